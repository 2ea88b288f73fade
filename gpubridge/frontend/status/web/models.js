// The header, what needs attention, and the table of models.

const firstLine = (text) => { const line = text.trim().split("\n")[0]; return line.length > 300 ? line.slice(0, 300) + "…" : line; };
const link = (model, text) => h("a", { href: "#" + encodeURIComponent(model.key) }, text || model.name);
function stack(parts, big) {
  const all = sum(parts);
  const made = h("div", { class: "stack" + (big ? " lineup" : ""), role: "img" });
  made.setAttribute("aria-label", PARTS.map((name, i) => name + " " + span(parts[i])).join(", "));
  made.title = made.getAttribute("aria-label");
  if (all) PARTS.forEach((name, i) => made.append(h("i", { class: name, css: { width: (100 * parts[i]) / all + "%" } })));
  return made;
}
// Name, title, help, class, value to sort by, cell.
const COLUMNS = [
  ["name", "Model", "name, and version above 1", "", (m) => m.name, (m) => [link(m), m.version > 1 ? h("span", { class: "soft" }, " v" + m.version) : null]],
  ["state", "State", "ready; degraded: some of its processes do not run; restarting: its process is started again; failed: it could not be loaded or started; loading, unloading, unloaded", "", (m) => m.rank, (m) => pill(m.condition, m.kind)],
  ["rate", "Requests/s", "requests that ended within the time, failed ones too (nv_inference_request_success + nv_inference_request_failure)", "n", (m) => (m.did ? m.did.rate : -1), (m) => (m.did ? number(m.did.rate) : "–")],
  ["p50", "p50", "half of the requests that succeeded took at most so long, estimated from a histogram (gpubridge_request_duration_seconds)", "n", (m) => (m.did && m.did.p50) || -1, (m) => (m.did ? span(m.did.p50) : "–")],
  ["p99", "p99", "99 % of the requests that succeeded took at most so long, estimated from a histogram (gpubridge_request_duration_seconds)", "n", (m) => (m.did && m.did.p99) || -1, (m) => (m.did ? span(m.did.p99) : "–")],
  ["queued", "Queue", "requests that no process has yet + those that one has (gpubridge_queued_requests, gpubridge_open_requests)", "n", (m) => m.queued || 0, (m) => (m.pending === undefined ? "–" : m.queued + (m.pending > m.queued ? " + " + (m.pending - m.queued) : ""))],
  ["time", "Where the time goes", "mean parts of the durations of requests that succeeded; the tooltips of the colours say what each is", "", (m) => (m.did && m.did.mean) || -1, (m) => (!m.did ? "–" : m.did.done ? stack(m.did.parts) : h("span", { class: "soft" }, m.did.failed ? "all failed" : "no requests"))],
  ["batch", "Batch", "mean batch size of executions (gpubridge_batch_size)", "n", (m) => (m.did && m.did.batch) || -1, (m) => (m.did && m.did.batch ? number(m.did.batch) : "–")],
  ["memory", "Memory", "of its processes (PSS), those that are measured", "n", (m) => m.bytes, (m) => (m.bytes ? size(m.bytes) : "–")],
  ["restarts", "Restarts", "how often its processes were started again, since the load", "n", restarts, (m) => { const n = restarts(m); return n ? pill(n, "warn") : "0"; }],
  ["errors", "Failed", "requests that failed within the time", "n", (m) => (m.did ? m.did.failed : -1), (m) => (m.did && m.did.failed ? pill(number(m.did.failed), "bad") : m.did ? "0" : "–")],
  ["copies", "Copies", "copies of tensor data by the bridge, for each request that succeeded (gpubridge_copies_total): a request over the network has one for its inputs and one for its outputs, one through shared memory has none", "", (m) => (m.did && m.did.zero ? 1 : 0), (m) => (!m.did || !m.did.done ? "" : m.did.zero ? pill("zero-copy", "good") : h("span", { class: "soft" }, number(sum(m.did.copies.map((c) => c.count)) / m.did.done) + " a request"))],
];
const RANKS = ["unloaded", "ready", "loading", "unloading", "degraded", "restarting", "failed"];
function describe(model) {
  model.did = figures(model);
  model.trouble = troubles(model);
  model.bytes = sum((model.instances || []).map((each) => (each.memory ? each.memory.pss_bytes : 0)));
  [model.kind, model.rank] = [KINDS[model.condition], RANKS.indexOf(model.condition)];
}
// Why the server is not ready: "2 of 13 models failed, 1 is loading".
function unready(models) {
  const wanted = models.filter((m) => m.condition !== "unloaded"), told = ["failed", "restarting", "loading"].map((word) => [word, wanted.filter((m) => m.condition === word).length]).filter(([, n]) => n);
  if (!told.length) return "";
  const text = told.map(([word, n], i) => n + (i ? "" : " of " + counted(wanted.length, "model")) + " " + (word === "failed" ? word : (n > 1 ? "are " : "is ") + word));
  return ": " + text.join(", ");
}
function showHeader() {
  const { server, machine } = state.doc, models = [...state.models.values()];
  const element = byId("state");
  element.textContent = server.ready ? "ready" : "not ready" + unready(models);
  element.className = "pill " + (server.ready ? "good" : "bad");
  const wanted = Number(byId("window").value), seen = state.doc.time - Math.max(state.first, server.started);
  byId("covered").textContent = !wanted || seen >= wanted - 1 ? "" : "so far " + (seen < 120 ? Math.round(seen) + " s" : span(seen * 1e6));
  const processes = models.flatMap((m) => m.instances || []).filter((each) => each.pid), measured = processes.filter((each) => each.memory).length;
  const unmeasured = measured < processes.length ? " (" + measured + " of " + processes.length + " processes measured)" : "";
  const gpus = machine.gpus.map((gpu) => ["GPU " + gpu.uuid.slice(0, 12), (gpu.memory_total_bytes ? size(gpu.memory_used_bytes) + " of " + size(gpu.memory_total_bytes) : "") + (gpu.utilization === undefined ? "" : ", " + Math.round(gpu.utilization * 100) + " %")]);
  const facts = [
    ["", number(sum(models.map((m) => (m.did ? m.did.rate : 0)))) + " requests/s"], ["up", span((state.doc.time - server.started) * 1e6)],
    ["CPU", machine.cpu_utilization === undefined ? "–" : Math.round(100 * machine.cpu_utilization) + " %"],
    ["memory", server.memory ? size(server.memory.pss_bytes) + " + models " + size(sum(models.map((m) => m.bytes))) + unmeasured : "–"], ...gpus,
    ["", (server.name === "triton" ? "" : server.name + ", ") + "gpubridge " + server.version + ", process " + server.pid],
  ];
  put(byId("facts"), facts, () => facts.map(([name, value]) => h("span", { class: "fact" }, name + " ", h("b", null, value))));
}
function showAttention(models) {
  const rank = (each) => (each.kind === "bad" ? 0 : 1), found = byCause(models.flatMap((model) => model.trouble)).sort((a, b) => rank(a) - rank(b));
  const loads = state.doc.loads.slice(0, 6).map((load) => [load.model, "loading for " + span((state.doc.time - load.since) * 1e6), load.step + (load.fraction === null ? "" : ", " + Math.round(100 * load.fraction) + " %")]);
  byId("attention").hidden = !found.length && !loads.length;
  const seen = found.slice(0, 6).map((each) => ({ ...each, also: [...each.also, ...(each.others ? ["also affects " + [...each.others].join(", ")] : [])] }));
  put(byId("attention"), [seen, found.length, loads], () => [
    h("h2", null, "Needs attention"),
    h("ul", { class: "attention" }, loads.map(([name, what, how]) => h("li", null, pill(what), h("span", { class: "what" }, h("b", null, name), " ", h("span", { class: "soft" }, how)))),
      seen.map(({ key, name, kind, what, why, also }) => h("li", null, pill(what, kind), h("span", { class: "what" }, link({ key, name }), " ", h("span", { class: "soft" }, [firstLine(why), ...also].join(" · ")))))),
    found.length > seen.length ? h("div", { class: "soft" }, "and " + (found.length - seen.length) + " more: ", h("button", { on: { click: () => choose("trouble") } }, "show them")) : null,
  ]);
}
const ROWS = 50, tableRows = new Map();
function showTable(models) {
  const heads = byId("models").tHead.rows[0];
  put(heads, [state.sort, state.down], () => COLUMNS.map(([name, title, help, kind]) => h("th", { class: kind, scope: "col", title: help, "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : null },
    h("button", { on: { click: () => { state.down = state.sort === name ? !state.down : name !== "name"; state.sort = name; show(); } } }, title + (state.sort === name ? (state.down ? " ↓" : " ↑") : "")))));
  const wanted = byId("filter").value.trim().toLowerCase();
  let found = models.filter((m) => m.name.toLowerCase().includes(wanted));
  if (state.only === "active") found = found.filter((m) => m.did && m.did.rate > 0);
  if (state.only === "trouble") found = found.filter((m) => m.trouble.length);
  const [, , , , by] = COLUMNS.find(([name]) => name === state.sort), way = state.down ? -1 : 1;
  found.sort((a, b) => { const x = by(a), y = by(b); return x < y ? -way : x > y ? way : a.key < b.key ? -1 : 1; });
  const pages = Math.max(1, Math.ceil(found.length / ROWS));
  state.page = Math.min(state.page, pages - 1);
  const seen = found.slice(state.page * ROWS, (state.page + 1) * ROWS);
  byId("count").textContent = found.length === models.length ? "Models (" + models.length + ")" : "Models (" + found.length + " of " + models.length + ")";
  byId("pages").hidden = pages === 1;
  byId("page").textContent = "page " + (state.page + 1) + " of " + pages;
  byId("before").disabled = !state.page;
  byId("next").disabled = state.page === pages - 1;
  const keys = new Set(seen.map((m) => m.key));
  for (const key of tableRows.keys()) if (!keys.has(key)) tableRows.delete(key);
  const made = seen.map((model) => {
    let row = tableRows.get(model.key);
    if (!row) tableRows.set(model.key, row = h("tr", { on: { click: () => { location.hash = encodeURIComponent(model.key); } } }, COLUMNS.map(([name, title, , kind]) => h("td", { class: kind || (name === "name" ? "name" : ""), "data-title": title }))));
    COLUMNS.forEach(([name, , , , value, cell], i) => put(row.cells[i], name === "time" && model.did ? [model.did.parts, model.did.failed > 0] : [value(model), model.condition, model.pending, model.queued, model.did && [model.did.copies, model.did.done]], () => cell(model)));
    row.classList.toggle("chosen", model.key === state.chosen);
    return row;
  });
  const body = byId("models").tBodies[0];
  if (made.length !== body.rows.length || made.some((row, i) => body.rows[i] !== row)) {
    const focus = document.activeElement;
    body.replaceChildren(...made);
    if (body.contains(focus)) focus.focus({ preventScroll: true });
  }
}
