// Differences of documents: what a model did within a time, and what needs attention.

const PARTS = [["queue", "queue"], ["input", "upload"], ["execute", "execute"], ["output", "download"], ["cache", "cache"], ["answer", "answer"]];
const HINTS = {
  queue: "Requests wait until an instance is free: more instances, batching, or fewer requests help.",
  input: "Making the inputs available takes longest: uploads to the GPU, or large inputs.",
  execute: "The model's own execute takes longest.",
  output: "Getting the outputs takes longest: downloads from the GPU, large outputs, or a busy machine.",
  cache: "Most requests are answered from the response cache.",
  answer: "Passing the responses on takes longest: clients that read slowly, or a busy server.",
};
const ROWS = 50, KEEP = 62, MANY = 300, EVERY = 2000, SELDOM = 4000;
const state = { number: 0, doc: null, first: 0, models: new Map(), history: new Map(), only: "all", sort: "rate", down: true, page: 0, chosen: "", paused: false, heard: 0 };

function remember() {
  const now = state.doc.time;
  state.first = state.first || now;
  for (const [key, model] of state.models) {
    if (!model.statistics) { state.history.delete(key); continue; }
    let past = state.history.get(key);
    if (!past || past[0].s.since !== model.statistics.since) state.history.set(key, past = []);
    past.push({ t: now, s: model.statistics });
    while (past.length > 2 && past[1].t < now - KEEP) past.shift();
  }
  for (const key of state.history.keys()) if (!state.models.has(key)) state.history.delete(key);
}
function rows(now, before) {
  const old = new Map(before);
  return now.map(([key, count]) => [key, count - (old.get(key) || 0)]).filter(([, count]) => count > 0);
}
// What a model did within the chosen time: between two documents, or since it was loaded.
function figures(model, seconds = Number(byId("window").value)) {
  const now = model.statistics;
  if (!now) return null;
  const past = state.history.get(model.key) || [];
  const nothing = { durations: [], batch_sizes: [], copies: {}, failures: {} };
  let from = { t: now.since, s: nothing };
  // Of a model that was loaded within this time, all is known.
  if (seconds && past.length > 1 && now.since < state.doc.time - seconds) from = past.find((each) => each.t >= state.doc.time - seconds - 1) || past[0];
  if (from.s === now && past.length > 1 && from.t === state.doc.time) from = past[past.length - 2];
  const less = (name) => now[name] - (from.s[name] || 0);
  const failed = sum(Object.entries(now.failures).map(([name, n]) => n - (from.s.failures[name] || 0)));
  const time = Math.max(state.doc.time - from.t, 0.001), done = less("success");
  const durations = rows(now.durations, from.s.durations), sizes = rows(now.batch_sizes, from.s.batch_sizes);
  const copies = Object.entries(now.copies).map(([kind, { count, bytes }]) => {
    const old = from.s.copies[kind] || { count: 0, bytes: 0 };
    return { kind, count: count - old.count, bytes: bytes - old.bytes };
  });
  const parts = PARTS.map(([name]) => (done ? less(name + "_us") / done : 0));
  return {
    done, failed, time, durations, sizes, copies, parts, rate: (done + failed) / time, mean: done ? less("request_us") / done : null,
    p50: quantile(durations, 0.5), p99: quantile(durations, 0.99), batch: sizes.length ? sum(sizes.map(([n, c]) => n * c)) / sum(sizes.map(([, c]) => c)) : null,
    zero: done > 0 && sum(copies.map((each) => each.count)) === 0,
  };
}
function quantile(durations, wanted) {
  const bounds = state.doc.duration_bounds_us, all = sum(durations.map(([, count]) => count));
  let left = wanted * all;
  for (const [index, count] of durations) {
    if (left <= count) {
      if (index === bounds.length) return Infinity;
      const low = index ? bounds[index - 1] : 0;
      return low + (bounds[index] - low) * (left / count);
    }
    left -= count;
  }
  return null;
}
const restarts = (model) => sum((model.instances || []).map((each) => each.restarts));
function ends(model) { return (model.instances || []).flatMap((each) => each.ends.map((end) => ({ ...end, instance: each.name }))).sort((a, b) => b.time - a.time); }

// What needs attention, the worst first.
function troubles(model) {
  const found = [], now = state.doc.time;
  if (model.state === "UNAVAILABLE" && model.reason && model.reason !== "unloaded") found.push(["bad", "not loaded", model.reason]);
  for (const each of model.instances || []) {
    if (each.state === "failing" || each.state === "restarting") found.push(["bad", each.state, (each.ends.at(-1) || {}).reason || each.name]);
    if (each.executing_us > 1e7) found.push(["warn", "executing for " + span(each.executing_us), each.name + " has not come back from execute"]);
  }
  const recent = ends(model).filter((end) => end.time > now - 3600);
  if (recent.length) found.push(["warn", "process ended " + ago(recent[0].time), firstLine(recent[0].reason) + (recent[0].output.length ? " It printed last: " + firstLine(recent[0].output.at(-1)) : "")]);
  const error = (model.errors || []).find((each) => each.last > now - 300);
  if (error && !recent.some((end) => end.reason === error.text)) found.push(["warn", error.requests + (error.requests === 1 ? " request failed, " : " requests failed, ") + ago(error.last), error.text]);
  const did = figures(model);
  if (did && model.queued > 4 && did.parts[0] > did.mean / 2) found.push(["warn", model.queued + " requests queued", Math.round(100 * did.parts[0] / did.mean) + " % of a request's time is waiting. " + HINTS.queue]);
  return found;
}
