// The tables of the server, and the loop that asks for documents.

function showServer(models) {
  const { slowest, regions } = state.doc;
  const errors = models.flatMap((model) => (model.errors || []).map((error) => ({ ...error, key: model.key, model: model.name }))).sort((a, b) => b.last - a.last).slice(0, 20);
  put(byId("server"), [slowest, errors, regions], () => [
    h("section", { class: "card", "aria-label": "slowest requests" }, h("h2", null, "Slowest requests of the last minutes"), slowTable(slowest, true)),
    h("section", { class: "card", "aria-label": "errors" }, h("h2", null, "Last errors"), errors.length ? errors.map((error) => fold("all" + error.key + error.text, false, [pill(clock(error.last), "bad"), " ", h("b", null, error.model), " " + firstLine(error.text) + " ", h("span", { class: "soft" }, error.requests + " ×")], h("pre", null, error.text))) : h("div", { class: "soft" }, "no request has failed lately")),
    regions.length ? h("section", { class: "card", "aria-label": "clients' shared memory" }, h("h2", null, "Clients' shared memory (" + regions.length + ")"), table([["Region", "the name that clients gave it"], ["Where", "its file, or its GPU"], ["Size", "its bytes that requests may use"], ["In use by", "requests in flight that use it"]],
      regions.slice(0, 200).map((region) => [region.name, region.device_id === undefined ? "/dev/shm" + region.key + (region.offset ? " + " + region.offset : "") : "GPU " + region.device_id, size(region.byte_size), region.uses + " requests"]))) : null,
  ]);
}
const MANY = 300, EVERY = 2000, SELDOM = 4000;
function show() {
  if (!state.doc) return;
  const models = [...state.models.values()];
  // Advice looks at other models' figures.
  for (const model of models) model.did = figures(model);
  models.forEach(describe);
  showHeader(); showAttention(models); showTable(models); showChosen(); showServer(models);
}
function take(doc) {
  if (doc.complete) state.models.clear();
  for (const model of doc.models) { model.key = model.name + "/" + model.version; state.models.set(model.key, model); }
  state.doc = doc;
  state.number = doc.number;
  remember();
  show();
}
async function poll() {
  if (!state.paused && !document.hidden) {
    let doc = null;
    try {
      // After a pause the server knows what this page has missed.
      const what = Date.now() - state.heard < LATELY * 1000 ? "after=" + state.number : "history=1";
      const answer = await fetch("/v2/gpubridge/status?" + what, { cache: "no-store" });
      if (!answer.ok) throw new Error("status " + answer.status);
      doc = await answer.json();
      state.heard = Date.now();
      take(doc);
    } catch (error) {
      if (doc) console.error(error);
      byId("state").textContent = (doc ? "this page has failed" : "no answer" + (state.heard ? " since " + new Date(state.heard).toLocaleTimeString() : "")) + ": " + error.message;
      byId("state").className = "pill bad";
    }
  }
  setTimeout(poll, state.models.size > MANY ? SELDOM : EVERY);
}
function choose(only) {
  state.only = only; state.page = 0;
  for (const each of document.querySelectorAll("[data-only]")) each.setAttribute("aria-pressed", String(each.dataset.only === only));
  show();
}
function follow() {
  try { state.chosen = decodeURIComponent(location.hash.slice(1)); } catch { state.chosen = ""; }
  show();
  if (state.chosen && !byId("chosen").hidden) byId("chosen").scrollIntoView({ block: "start", behavior: "smooth" });
}
function step(by) {
  const keys = [...byId("models").tBodies[0].rows].map((row) => [...tableRows].find(([, each]) => each === row)[0]);
  const next = keys[Math.min(keys.length - 1, Math.max(0, keys.indexOf(state.chosen) + by))];
  if (next) location.hash = encodeURIComponent(next);
}
put(byId("legend"), 0, () => PARTS.map((name) => h("span", { title: PART_HELP[name] }, h("span", { class: "key " + name }), name + "\u2002")));
byId("filter").addEventListener("input", () => { state.page = 0; show(); });
byId("window").addEventListener("change", show);
byId("before").addEventListener("click", () => { state.page--; show(); });
byId("next").addEventListener("click", () => { state.page++; show(); });
byId("pause").addEventListener("click", (event) => { state.paused = !state.paused; event.target.setAttribute("aria-pressed", String(state.paused)); event.target.textContent = state.paused ? "Go on" : "Pause"; });
for (const each of document.querySelectorAll("[data-only]")) each.addEventListener("click", () => choose(each.dataset.only));
addEventListener("hashchange", follow);
addEventListener("keydown", (event) => {
  const typing = ["INPUT", "TEXTAREA", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape") { event.target.blur(); if (!typing) location.hash = ""; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { event.preventDefault(); byId("filter").focus(); }
  if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
});
follow();
poll();
