// One model: its figures, instances and errors.

const panel = {};
function openPanel(model) {
  const section = (name, title) => (panel[name] = h("div", { "data-part": name }), title ? h("div", null, h("h3", null, title), panel[name]) : panel[name]);
  byId("chosen").replaceChildren(
    h("div", { class: "tools" }, h("h2", null, model.name + (model.version ? ", version " + model.version : "")), section("about"), h("span", { class: "space" }), h("button", { id: "close", on: { click: () => { location.hash = ""; } } }, "Close")),
    section("verdict"), section("ensemble"),
    h("div", { class: "columns" }, section("durations", "Durations of requests"), section("batches", "Batch sizes"), section("trend", "The last 15 minutes")),
    section("instances", "Instances"), section("ends", "Why processes ended"), section("errors", "Errors"), section("slowest", "Slowest requests of the last minutes"), section("copies", "Copies and slower paths"), section("attempt", "Try it"));
  panel.key = model.key;
  panel.since = null;
}
function showChosen() {
  const model = state.models.get(state.chosen), place = byId("chosen");
  place.hidden = !model;
  if (!model) { panel.key = ""; return; }
  if (panel.key !== model.key) openPanel(model);
  const did = model.did, about = [model.condition, model.backend, model.scheduler, model.max_batch_size, model.decoupled, model.reason];
  put(panel.about, about, () => [pill(model.condition, model.kind), h("span", { class: "soft" }, [" " + (model.backend || ""), (model.scheduler || "").replace("_", " "), model.max_batch_size ? "batches of up to " + model.max_batch_size : "", model.decoupled ? "decoupled" : ""].filter(Boolean).join(", "))]);
  for (const [name, element] of Object.entries(panel)) if (element instanceof Element && name !== "about" && name !== "verdict") (element.parentElement === place || !element.previousSibling ? element : element.parentElement).hidden = !did;
  showVerdict(model, did);
  if (!did) return;
  showGraph(model);
  put(panel.durations, [did.durations, did.failed > 0], () => columns(did.durations.map(([index, count]) => [state.doc.duration_bounds_us[index] ? "≤ " + span(state.doc.duration_bounds_us[index]) : "longer", count]), none(did)));
  put(panel.batches, did.sizes, () => columns(did.sizes.sort((a, b) => a[0] - b[0]), "no executions in this time"));
  showTrend(model);
  showInstances(model);
  const ended = ends(model);
  put(panel.ends, ended, () => (ended.length ? ended.map((end, i) => fold("end" + end.instance + end.time, !i, [pill(clock(end.time), "warn"), " " + end.instance + ": " + firstLine(end.reason)], h("pre", null, end.reason + (end.output.length ? "\n\nprinted last:\n" + end.output.join("\n") : "\n\n(it printed nothing)")))) : h("div", { class: "soft" }, "no process has ended since the load")));
  put(panel.errors, model.errors, () => (model.errors.length ? model.errors.map((error, i) => fold("error" + model.key + error.text, !i, [pill(error.requests + " ×", "bad"), " " + firstLine(error.text) + " ", h("span", { class: "soft" }, "last at " + clock(error.last) + (error.identifier ? ", request " + error.identifier : ""))], h("pre", null, error.text))) : h("div", { class: "soft" }, "no request has failed lately")));
  put(panel.slowest, model.slowest, () => slowTable(model.slowest, false));
  showCopies(model, did);
  showAttempt(model);
}
const none = (did) => (did.failed ? "All requests failed in this time." : "No requests in this time.");
function showVerdict(model, did) {
  const what = did ? [did.done, did.failed, did.parts, did.p50, did.p99, did.rate, model.trouble] : [model.trouble, model.reason];
  put(panel.verdict, what, () => {
    const trouble = model.trouble.map(({ kind, what, why, also }) => h("div", { class: "verdict " + kind }, h("b", null, what + ": "), [firstLine(why), ...also].join(" · ")));
    if (!did) return [...trouble, model.reason ? h("pre", null, model.reason) : null];
    if (!did.done) return [...trouble, h("p", { class: "soft" }, none(did))];
    const most = did.parts.indexOf(Math.max(...did.parts)), share = Math.round((100 * did.parts[most]) / (sum(did.parts) || 1));
    return [
      ...trouble,
      h("div", { class: "big" }, [
        [number(did.rate), "requests/s", COLUMNS[2][2]], [span(did.p50), "p50", COLUMNS[3][2]], [span(did.p99), "p99", COLUMNS[4][2]], [span(did.mean), "mean", "mean duration of the requests that succeeded (nv_inference_request_duration_us)"],
        [String(model.queued), "queued", "requests that no process has yet (gpubridge_queued_requests)"], [String(model.pending), "pending", "requests without a last response (gpubridge_open_requests)"],
      ].map(([value, name, help]) => h("div", { title: help }, h("b", null, value), h("span", { class: "soft" }, name)))),
      h("h3", null, "Where the time of a request goes"), stack(did.parts, true),
      h("div", { class: "big" }, PARTS.map((name, i) => h("div", { title: PART_HELP[name] }, h("span", { class: "key " + name }), name + " ", h("strong", null, span(did.parts[i]))))),
      h("div", { class: "verdict" }, h("b", null, PARTS[most] + ", " + share + " % of the time. "), advice(model, did, PARTS[most]), sum(did.parts) > 1.02 * did.mean ? " Steps that run side by side count each." : null),
    ];
  });
}
function columns(data, none) {
  if (!data.length) return h("div", { class: "soft" }, none);
  const most = Math.max(...data.map(([, count]) => count)), all = sum(data.map(([, count]) => count));
  const wide = 330, high = 84, each = Math.min(40, wide / data.length);
  const made = s("svg", { viewBox: `0 0 ${wide} ${high + 18}`, width: wide, height: high + 18, role: "img", "aria-label": data.map(([name, count]) => name + ": " + count).join(", ") });
  data.forEach(([name, count], i) => {
    const tall = Math.max(1.5, (count / most) * (high - 4));
    made.append(s("rect", { class: "column", x: i * each + 1, y: high - tall, width: Math.max(1, each - 2), height: tall, rx: 1 }, s("title", {}, name + ": " + count + " (" + ((100 * count) / all).toFixed(1) + " %)")));
    if (data.length <= 8 && each > 20) made.append(s("text", { class: "dim", x: i * each + each / 2, y: high + 13, "text-anchor": "middle" }, String(name).replace("≤ ", "").replace(" ", "")));
  });
  if (data.length > 8 || each <= 20) made.append(s("text", { class: "dim", x: 0, y: high + 13 }, String(data[0][0])), s("text", { class: "dim", x: Math.min(wide, data.length * each), y: high + 13, "text-anchor": "end" }, String(data.at(-1)[0])));
  return made;
}
// Rates and p99 between moments, drawn over the time from the begin of what is known until now.
function showTrend(model) {
  const past = state.history.get(model.key) || [], now = state.doc.time, points = [];
  for (let i = 1; i < past.length; i++) {
    const sums = past[i].s, old = past[i - 1].s, time = past[i].t - past[i - 1].t;
    if (time > 0) points.push({ begin: past[i - 1].t, end: past[i].t, values: [(requests(sums) - requests(old)) / time, quantile(rows(sums.durations, old.durations), 0.99)] });
  }
  const begin = Math.max(now - KEEP, past.length ? past[0].t : now), wide = 330, high = 42;
  const line = (which, title, write) => {
    const values = points.map((each) => each.values[which] || 0), most = Math.max(...values), top = Math.min(most, state.doc.duration_bounds_us.at(-1)) || 1;
    const x = (time) => ((wide * Math.max(0, time - begin)) / (now - begin)).toFixed(1);
    const steps = points.map((each, i) => { const y = (high - Math.min(values[i] / top, 1) * (high - 4)).toFixed(1); return x(each.begin) + "," + y + " " + x(each.end) + "," + y; });
    return h("div", { class: "soft" }, title + ", at most " + write(most), s("svg", { viewBox: `0 0 ${wide} ${high + 2}`, width: wide, height: high + 2, role: "img", "aria-label": title }, s("polyline", { class: "trend", points: steps.join(" ") })));
  };
  put(panel.trend, points, () => {
    if (!points.length) return h("div", { class: "soft" }, "measuring");
    if (!points.some(({ values }) => values[0])) return h("div", { class: "soft" }, "no requests");
    return [line(0, "requests/s", number), line(1, "p99", span), h("div", { class: "soft ends" }, h("span", null, span((now - begin) * 1e6) + " ago"), h("span", null, "now"))];
  });
}
const INSTANCE_COLUMNS = [
  ["Instance", "its name in the log"], ["State", "starting, ready, restarting, or failed: it does not start"], ["Process", "its process id"], ["Python", "the version of its Python; the tooltip has its path"], ["Device", "CPU, or the number of its GPU"],
  ["Memory (PSS)", "memory of its process, where shared memory is divided among those who share it"], ["RSS", "memory of its process, with all that it shares"], ["GPU memory", "memory on the GPU that it shares with the server and other models (not that of its frameworks)"],
  ["In flight", "requests at its process"], ["Executing for", "for how long the present execute has run"], ["Started", "when its process was started"], ["Restarts", "how often its process was started again, since the load"],
];
function showInstances(model) {
  const what = model.instances.map((each) => [each, each.started && ago(each.started)]);
  put(panel.instances, what, () => (!what.length ? h("div", { class: "soft" }, "an ensemble has no process of its own") : table(INSTANCE_COLUMNS, what.map(([each, started]) => [
    each.name, pill(each.state, each.state === "ready" ? "good" : "bad"), each.pid || "–", h("span", { title: each.interpreter }, each.python || "–"), each.device === null ? "CPU" : "GPU " + each.device,
    each.memory ? size(each.memory.pss_bytes) : "–", each.memory ? size(each.memory.rss_bytes) : "–", each.device_memory_bytes ? size(each.device_memory_bytes) : "–", each.in_flight, each.executing_us ? span(each.executing_us) : "–", started || "–", each.restarts ? pill(each.restarts, "warn") : "0",
  ]))));
}
function slowTable(slow, named) {
  if (!slow.length) return h("div", { class: "soft" }, "none");
  const titles = [...(named ? [["Model", "the model that had the request"]] : []), ["Request", "the id that its client gave it"], ["At", "when its execution ended"], ["Took", "its whole duration"], ...PARTS.map((name) => [name, PART_HELP[name]]), ["", "the same parts as a bar"]];
  return table(titles, slow.map((row) => [...(named ? [link({ key: row.model + "/" + row.version }, row.model)] : []), h("span", { class: "name" }, row.id || "–"), clock(row.time), h("b", null, span(row.request_us)),
    ...PARTS.map((name) => span(row[name + "_us"])), stack(PARTS.map((name) => row[name + "_us"]))]), (i) => i >= titles.length - 2 - PARTS.length && i < titles.length - 1);
}
function showCopies(model, did) {
  put(panel.copies, [did.copies, did.done, did.zero, model.fallbacks], () => [
    did.zero ? h("div", null, pill("zero-copy", "good"), " the bridge has copied no tensor data for these requests") : null,
    h("div", null, did.copies.filter((each) => each.count).map((each) => h("div", { title: COPY_HELP[each.kind] }, h("b", null, each.kind), " " + number(each.count) + " copies, " + size(each.bytes) + (did.done ? ", " + number(each.count / did.done) + " a request" : "")))),
    ...Object.entries(model.fallbacks).map(([reason, count]) => h("div", null, pill("slower path", "warn"), " " + reason.replaceAll("_", " ") + ": " + count + " ×")),
    !did.done && !Object.keys(model.fallbacks).length ? h("div", { class: "soft" }, "none") : null,
  ]);
}
