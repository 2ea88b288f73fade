// Steps in layers from left to right; a node has its mean time, an edge how long its tensors waited for the next step.
function showGraph(model) {
  put(panel.ensemble, model.ensemble, () => {
    if (!model.ensemble) return null;
    const { steps, edges } = model.ensemble, depth = new Map([[null, 0]]);
    for (let round = 0; round <= steps.length; round++) for (const { from, to } of edges) if (to !== null && depth.has(from)) depth.set(to, Math.max(depth.get(to) || 0, depth.get(from) + 1));
    const last = Math.max(...depth.values()) + 1, layers = Array.from({ length: last + 1 }, () => []);
    layers[0].push("request"); steps.forEach((_, i) => layers[depth.get(i) || 1].push(i)); layers[last].push("response");
    const wide = 170, gap = 110, tall = 46, room = 26, rowsHigh = Math.max(...layers.map((each) => each.length)), height = rowsHigh * (tall + room) + 10, at = new Map();
    layers.forEach((layer, x) => layer.forEach((node, y) => at.set(node, [x * (wide + gap) + 2, (height - layer.length * (tall + room) + room) / 2 + y * (tall + room)])));
    const total = layers.length * (wide + gap) - gap + 4, made = s("svg", { viewBox: `0 0 ${total} ${height}`, width: total, height, role: "img", "aria-label": "graph of the ensemble" });
    const longest = Math.max(1, ...edges.map((each) => each.wait_us / Math.max(1, each.count)));
    const labels = [];
    for (const edge of edges) {
      const [x1, y1] = at.get(edge.from === null ? "request" : edge.from), [x2, y2] = at.get(edge.to === null ? "response" : edge.to);
      const a = [x1 + wide, y1 + tall / 2], b = [x2, y2 + tall / 2], mean = edge.count ? edge.wait_us / edge.count : null, middle = (a[0] + b[0]) / 2;
      made.append(s("path", { class: "edge" + (mean > longest / 2 && mean > 1000 ? " wait" : ""), d: `M${a} C${middle},${a[1]} ${middle},${b[1]} ${b}` }, s("title", {}, edge.tensors.join(", "))));
      if (mean !== null) labels.push([...onCurve(a, b, x2 - gap / 2), "waits " + span(mean)]);
    }
    // Above all lines, on a ground of their own, and none on another.
    labels.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    labels.forEach(([x, y, text], i) => {
      const before = labels[i - 1];
      if (before && before[0] === x && y - before[1] < 14) y = labels[i][1] = before[1] + 14;
      made.append(s("text", { class: "dim ground", x, y: y + 4, "text-anchor": "middle" }, text));
    });
    const slowest = Math.max(...steps.map((step) => (step.count ? step.step_us / step.count : 0)));
    for (const [node, [x, y]] of at) {
      const step = typeof node === "number" ? steps[node] : null, mean = step && step.count ? step.step_us / step.count : null;
      const name = step ? step.model : node;
      made.append(s("rect", { class: "node", x, y, width: wide, height: tall, rx: 7 }, s("title", {}, name)));
      if (mean) made.append(s("rect", { class: "column", x, y: y + tall - 4, width: Math.max(3, (wide * mean) / slowest), height: 4, rx: 2 }));
      made.append(s("text", { x: x + 10, y: y + (step ? 19 : 27) }, name.length > 22 ? name.slice(0, 21) + "…" : name));
      if (step) made.append(s("text", { class: "dim", x: x + 10, y: y + 35 }, mean === null ? "not called" : span(mean) + ", " + number(step.count) + " requests"));
    }
    return [h("h3", null, "Graph: means since the load"), h("div", { class: "scroll" }, made)];
  });
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
