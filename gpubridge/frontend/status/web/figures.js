// Differences of documents: what a model did within a time, and what needs attention.

const PARTS = ["queue", "input", "execute", "output", "cache", "answer"];
// What each part of a request's duration is, and the metric that sums it.
const PART_HELP = {
  queue: "queue: from a request's arrival at the model until a process had it (nv_inference_queue_duration_us)",
  input: "input: until execute was called: inputs were read, or uploaded to the GPU (nv_inference_compute_input_duration_us)",
  execute: "execute: in the model's execute, or until its last response (nv_inference_compute_infer_duration_us)",
  output: "output: until the server had what execute answered: outputs were encoded, or downloaded from the GPU (nv_inference_compute_output_duration_us)",
  cache: "cache: until the response cache answered (nv_cache_hit_duration_per_model)",
  answer: "answer: until the response was passed on to the client's connection, or to the model that called (gpubridge_answer_duration_us_total)",
};
const COPY_HELP = {
  host: "host: tensor data that the bridge copied in the machine's memory, such as the inputs of a request's body (gpubridge_copies_total)",
  h2d: "h2d: from the machine's memory to a GPU", d2h: "d2h: from a GPU to the machine's memory", d2d: "d2d: within a GPU", p2p: "p2p: from one GPU to another",
};
const HINTS = {
  input: "Making the inputs available takes longest: large inputs, or uploads to the GPU.",
  execute: "The model's own execute takes longest.",
  output: "Getting the outputs takes longest: large outputs, downloads from the GPU, or a busy machine.",
  cache: "Most requests are answered from the response cache.",
  answer: "Passing the responses on takes longest: clients that read slowly, or a busy server.",
};
// The call that takes most of a model's execute, if calls take half of it or more.
function heaviest(model) {
  const calls = model.calls || [], most = calls.reduce((best, each) => (best && best.call_us >= each.call_us ? best : each), null);
  return most && most.call_us >= model.statistics.execute_us / 2 ? most : null;
}
// What to change, of the model or of what it needs most: a caller's processes are busy while the called model is.
function advice(model, did, part, seen = []) {
  const steps = model.ensemble ? model.ensemble.steps : [], call = heaviest(model) || steps.reduce((best, each) => (best && best.step_us >= each.step_us ? best : each), null);
  if (part !== "execute" && !(part === "queue" && call)) return part === "queue" ? queueAdvice(model) : HINTS[part];
  if (!call) return HINTS.execute;
  const needed = [...state.models.values()].find((each) => each.name === call.model && each.did && (!call.version || each.version === call.version));
  const share = Math.round((100 * (call.call_us || call.step_us)) / (model.statistics.execute_us || 1)), own = part === "queue" ? "Requests wait, and " : "", told = own + Math.min(100, share) + " % of its execute " + (model.ensemble ? "is its step " : "are its calls of ") + call.model + ". ";
  if (!needed || !needed.did.done || seen.includes(needed.key)) return told;
  const most = PARTS[needed.did.parts.indexOf(Math.max(...needed.did.parts))];
  if (most === "execute" && !heaviest(needed) && !needed.ensemble) return told + "It is " + needed.name + "'s own execute that takes longest.";
  return told + "There " + most + " takes most. " + advice(needed, needed.did, most, [...seen, model.key]);
}
// What to change in the model's config.pbtxt for requests that wait.
function queueAdvice(model) {
  const count = model.instances.length, more = "instance_group [{ count: " + (count + 1) + " }]", waits = "Requests wait until a process is free. ", batch = model.did && model.did.batch;
  if (model.scheduler === "sequence_batching") return waits + "In config.pbtxt " + more + " starts one more for other sequences.";
  if (!model.max_batch_size) return waits + "config.pbtxt has no max_batch_size, so each is executed alone: max_batch_size: 8 with dynamic_batching {} lets those that wait be executed together, where the model can; " + more + " starts another process.";
  if (!model.scheduler) return waits + "config.pbtxt lacks dynamic_batching {}, so each is executed alone, although max_batch_size is " + model.max_batch_size + ".";
  if (batch && batch > 0.8 * model.max_batch_size) return waits + "Batches are full (" + number(batch) + " of " + model.max_batch_size + "): in config.pbtxt a larger max_batch_size, or " + more + " for another process.";
  return waits + "They are batched (" + (batch ? number(batch) + " of " : "up to ") + model.max_batch_size + "): in config.pbtxt " + more + " starts another process.";
}
const NOTHING = { success: 0, durations: [], batch_sizes: [], copies: {}, failures: {} };
// Seconds of the past, those in which all documents are kept, and entries after which older ones are left out.
const KEEP = 900, LATELY = 75, FULL = 250;
const state = { number: 0, doc: null, first: 0, models: new Map(), history: new Map(), only: "all", sort: "rate", down: true, page: 0, chosen: "", paused: false, heard: 0 };

// The sums of each model at moments, the earliest first: what the server kept, and every document since.
function remember() {
  const now = state.doc.time;
  if (state.doc.history) recall(state.doc.history);
  for (const [key, model] of state.models) {
    if (!model.statistics) { state.history.delete(key); continue; }
    let past = state.history.get(key);
    if (!past || past[0].since !== model.statistics.since) state.history.set(key, past = []);
    const entry = { t: now, s: model.statistics, since: model.statistics.since };
    // Of a time in which nothing was done the begin and the end are enough.
    if (past.length > 1 && [past.at(-1), past.at(-2)].every((each) => each.s === entry.s)) past[past.length - 1] = entry;
    else past.push(entry);
    while (past.length > 2 && past[1].t < now - KEEP) past.shift();
    if (past.length > FULL) thin(past, now);
  }
  for (const key of state.history.keys()) if (!state.models.has(key)) state.history.delete(key);
}
// Leaves moments ten seconds apart, but for the last minute.
function thin(past, now) {
  let last = 0;
  const kept = past.filter(({ t }, i) => (i < 2 || t > now - LATELY || t - last >= 9) && (last = t));
  past.splice(0, past.length, ...kept);
}
// The server tells the last sums, and what each step has added to them.
function recall(history) {
  state.first = history.begin;
  state.history.clear();
  for (const [key, model] of state.models) if (model.statistics) {
    const told = history.models.find((each) => each.name === model.name && each.version === model.version && each.since === model.statistics.since);
    const past = [], since = model.statistics.since;
    let sums = told ? told.sums : NOTHING;
    for (const step of told ? told.steps.reverse() : []) {
      past.push({ t: step.end, s: sums, since });
      sums = without(sums, step);
      if (past.at(-1).t > step.begin) past.push({ t: step.begin, s: sums, since });
    }
    past.push({ t: Math.max(history.begin, since), s: sums, since });
    state.history.set(key, past.reverse());
  }
}
// What was there before a step: its numbers and those of its buckets less.
function without(sums, step) {
  const before = {};
  for (const [name, value] of Object.entries(sums)) {
    const added = step[name];
    if (added === undefined) before[name] = value;
    else if (Array.isArray(value)) before[name] = rows(value, added);
    else before[name] = typeof value === "object" ? without(value, added) : value - added;
  }
  return before;
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
  let from = { t: now.since, s: NOTHING };
  // Of a model that was loaded within this time, all is known.
  if (seconds && past.length > 1 && now.since < state.doc.time - seconds) from = at(past, state.doc.time - seconds);
  if (from.s === now && past.length > 1 && from.t === state.doc.time) from = past[past.length - 2];
  const less = (name) => now[name] - (from.s[name] || 0);
  const failed = sum(Object.entries(now.failures).map(([name, n]) => n - (from.s.failures[name] || 0)));
  const time = Math.max(state.doc.time - from.t, 0.001), done = less("success");
  const durations = rows(now.durations, from.s.durations), sizes = rows(now.batch_sizes, from.s.batch_sizes);
  const copies = Object.entries(now.copies).map(([kind, { count, bytes }]) => {
    const old = from.s.copies[kind] || { count: 0, bytes: 0 };
    return { kind, count: count - old.count, bytes: bytes - old.bytes };
  });
  const parts = PARTS.map((name) => (done ? less(name + "_us") / done : 0));
  return {
    done, failed, time, durations, sizes, copies, parts, rate: (done + failed) / time, mean: done ? less("request_us") / done : null,
    p50: quantile(durations, 0.5), p99: quantile(durations, 0.99), batch: sizes.length ? sum(sizes.map(([n, c]) => n * c)) / sum(sizes.map(([, c]) => c)) : null,
    zero: done > 0 && sum(copies.map((each) => each.count)) === 0,
  };
}
const requests = (sums) => sums.success + sum(Object.values(sums.failures));
// The sums at a moment, or at the nearest that is known.
function at(past, time) {
  const next = past.findIndex((each) => each.t > time), later = past.at(next), earlier = past[next - 1] || later;
  if (next > 0 && requests(earlier.s) === requests(later.s)) return { t: time, s: earlier.s };
  return Math.abs(later.t - time) < Math.abs(earlier.t - time) ? later : earlier;
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

const KINDS = { ready: "good", degraded: "warn", restarting: "bad", failed: "bad", loading: "warn", unloading: "warn", unloaded: "" };
const counted = (n, what, more = what + "s") => n + " " + (n === 1 ? what : more);

// What needs attention: one entry for each cause, with all that it leads to. `causes`: texts by which what it leads to is known.
function troubles(model) {
  const found = [], now = state.doc.time, instances = model.instances || [], did = model.did;
  const recent = ends(model).filter((end) => end.time > now - 3600), last = recent[0];
  const failed = (error) => counted(error.requests, "request") + " failed, " + ago(error.last);
  let errors = (model.errors || []).filter((each) => each.last > now - 300);
  const add = (kind, what, why, causes = []) => {
    const led = errors.filter((each) => causes.some((text) => each.text.includes(text)));
    errors = errors.filter((each) => !led.includes(each));
    const also = led.length ? [counted(sum(led.map((each) => each.requests)), "request") + " failed with it"] : [];
    found.push({ kind, what, why, causes, also, key: model.key, name: model.name });
  };
  const printed = last && last.output.length ? " It printed last: " + firstLine(last.output.at(-1)) : "";
  const running = instances.some((each) => each.state !== "ready");
  if (model.condition === "failed" && !instances.length && model.reason) add("bad", "failed", model.reason, [model.reason]);
  else if (last) {
    const word = running ? model.condition : "restarted", times = recent.length > 1 ? " " + counted(recent.length, "time") + " within the hour." : "";
    add(KINDS[model.condition] === "bad" ? "bad" : "warn", running ? word : word + " " + ago(last.time), firstLine(last.reason) + times + printed, recent.map((end) => firstLine(end.reason)));
  } else if (KINDS[model.condition] === "bad") add("bad", model.condition, model.ensemble ? "one of its members is " + model.condition : "its process does not run");
  const stuck = instances.find((each) => each.executing_us > 1e7);
  if (stuck) add("warn", "executing for " + span(stuck.executing_us), stuck.name + " has not come back from execute" + (model.queued ? "; " + counted(model.queued, "request waits", "requests wait") : ""));
  const [error, ...more] = errors.splice(0);
  if (error) add("warn", failed(error), firstLine(error.text) + (more.length ? " · and " + counted(more.length, "other error") : ""), [firstLine(error.text)]);
  if (did && !found.some((each) => each.kind === "bad") && !stuck && model.queued > 4 && did.parts[0] > did.mean / 2) add("warn", counted(model.queued, "request") + " queued", Math.round(100 * did.parts[0] / did.mean) + " % of a request's time is waiting. " + advice(model, did, "queue"));
  return found;
}
// Leaves one entry for a cause that several models suffer from: an entry of a caller or an ensemble goes with that of the model it needs.
function byCause(entries) {
  const kept = [];
  for (const entry of entries) {
    const { ensemble } = state.models.get(entry.key), needs = new Set((ensemble ? ensemble.steps : []).map((step) => step.model));
    const leads = (each) => {
      if (each.key === entry.key) return false;
      if (each.kind === "bad" && entry.kind === "bad" && (needs.has(each.name) || entry.causes.some((text) => text.includes("'" + each.name + "'")))) return true;
      return entry.causes.some((text) => each.causes.some((own) => (text === own ? needs.has(each.name) : text.includes(own))));
    };
    const cause = entries.find(leads);
    if (cause) (cause.others = cause.others || new Set()).add(entry.name);
    else kept.push(entry);
  }
  return kept;
}
