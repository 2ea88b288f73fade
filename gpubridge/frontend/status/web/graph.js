// Nodes in layers from left to right, and edges with labels. A node is a title, a line below it, and the part of its width that a bar has.
function draw(layers, nodes, edges, title) {
  const wide = 170, gap = 110, tall = 46, room = 26, rowsHigh = Math.max(...layers.map((each) => each.length)), height = rowsHigh * (tall + room) + 10, at = new Map();
  layers.forEach((layer, x) => layer.forEach((node, y) => at.set(node, [x * (wide + gap) + 2, (height - layer.length * (tall + room) + room) / 2 + y * (tall + room)])));
  const total = layers.length * (wide + gap) - gap + 4, made = s("svg", { viewBox: `0 0 ${total} ${height}`, width: total, height, role: "img", "aria-label": title }), labels = [];
  for (const { from, to, label, slow, help } of edges) {
    const [x1, y1] = at.get(from), [x2, y2] = at.get(to), a = [x1 + wide, y1 + tall / 2], b = [x2, y2 + tall / 2], middle = (a[0] + b[0]) / 2;
    made.append(s("path", { class: "edge" + (slow ? " wait" : ""), d: `M${a} C${middle},${a[1]} ${middle},${b[1]} ${b}` }, s("title", {}, help)));
    if (label) labels.push([...onCurve(a, b, x2 - gap / 2), label]);
  }
  // Above all lines, on a ground of their own, and none on another.
  labels.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  labels.forEach(([x, y, text], i) => {
    const before = labels[i - 1];
    if (before && before[0] === x && y - before[1] < 14) y = labels[i][1] = before[1] + 14;
    made.append(s("text", { class: "dim ground", x, y: y + 4, "text-anchor": "middle" }, text));
  });
  for (const [node, [x, y]] of at) {
    const { name, line, part } = nodes.get(node);
    made.append(s("rect", { class: "node", x, y, width: wide, height: tall, rx: 7 }, s("title", {}, name)));
    if (part) made.append(s("rect", { class: "column", x, y: y + tall - 4, width: Math.max(3, wide * Math.min(1, part)), height: 4, rx: 2 }));
    made.append(s("text", { x: x + 10, y: y + (line ? 19 : 27) }, name.length > 22 ? name.slice(0, 21) + "…" : name));
    if (line) made.append(s("text", { class: "dim", x: x + 10, y: y + 35 }, line));
  }
  return h("div", { class: "scroll" }, made);
}
function showGraph(model) {
  const calls = model.calls || [], executed = model.statistics.success;
  put(panel.ensemble, [model.ensemble, calls, executed], () => {
    if (model.ensemble) return [h("h3", null, "Graph: means since the load"), drawEnsemble(model.ensemble)];
    return calls.length ? [h("h3", { title: "Calls (BLS) by this model since its load. Those that are made together overlap: their parts of execute may be more than 100 % together, as they are where requests fail after calls." }, "Called models since the load"), drawCalls(model, calls)] : null;
  });
}
// A node has its mean time, an edge how long its tensors waited for the next step.
function drawEnsemble({ steps, edges }) {
  const depth = new Map([[null, 0]]), end = (place, name) => (place === null ? name : place);
  for (let round = 0; round <= steps.length; round++) for (const { from, to } of edges) if (to !== null && depth.has(from)) depth.set(to, Math.max(depth.get(to) || 0, depth.get(from) + 1));
  const last = Math.max(...depth.values()) + 1, layers = Array.from({ length: last + 1 }, () => []);
  layers[0].push("request"); steps.forEach((_, i) => layers[depth.get(i) || 1].push(i)); layers[last].push("response");
  const means = steps.map((step) => (step.count ? step.step_us / step.count : null)), slowest = Math.max(...means), waits = edges.map((each) => (each.count ? each.wait_us / each.count : null)), longest = Math.max(1, ...waits);
  const nodes = new Map([["request", { name: "request" }], ["response", { name: "response" }]]);
  steps.forEach((step, i) => nodes.set(i, { name: step.model, line: means[i] === null ? "not called" : span(means[i]) + ", " + number(step.count) + " requests", part: means[i] / slowest }));
  return draw(layers, nodes, edges.map((each, i) => ({ from: end(each.from, "request"), to: end(each.to, "response"), label: waits[i] === null ? "" : "waits " + span(waits[i]), slow: waits[i] > longest / 2 && waits[i] > 1000, help: each.tensors.join(", ") })), "graph of the ensemble");
}
// A called model has the part of the caller's execute that its calls took.
function drawCalls(model, calls) {
  const { execute_us, success } = model.statistics, key = (each) => each.model + "/" + each.version, nodes = new Map([["", { name: model.name, line: success ? span(execute_us / success) + " in execute" : "" }]]);
  for (const each of calls) nodes.set(key(each), { name: each.model + (each.version > 1 ? " v" + each.version : ""), line: each.count ? span(each.call_us / each.count) + ", " + number(each.count) + " calls" : "not answered yet", part: each.call_us / execute_us });
  const edges = calls.map((each) => ({ from: "", to: key(each), label: Math.round(Math.min(100, (100 * each.call_us) / execute_us)) + " %", slow: each === heaviest(model), help: "the part of execute that its calls took" }));
  return draw([[""], calls.map(key)], nodes, execute_us ? edges : edges.map((each) => ({ ...each, label: "" })), "models that this model calls");
}
// The point of an edge's curve at x: between its ends it bends as a Bezier curve whose controls are in the middle.
function onCurve([x1, y1], [x2, y2], x) {
  const middle = (x1 + x2) / 2, mix = (t, p, q, r, z) => (1 - t) ** 3 * p + 3 * (1 - t) ** 2 * t * q + 3 * (1 - t) * t * t * r + t ** 3 * z;
  let low = 0, high = 1;
  for (let i = 0; i < 20; i++) {
    const t = (low + high) / 2;
    if (mix(t, x1, middle, middle, x2) < x) low = t; else high = t;
  }
  return [x, mix(low, y1, y1, y2, y2)];
}
