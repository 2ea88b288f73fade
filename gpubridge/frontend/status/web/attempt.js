// The form that tries a model.

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
async function showAttempt(model) {
  if (panel.since === model.statistics.since) return;
  panel.since = model.statistics.since;
  const path = "/v2/models/" + encodeURIComponent(model.name) + "/versions/" + model.version, place = panel.attempt;
  if (model.decoupled) { place.replaceChildren(h("div", { class: "soft" }, "A decoupled model answers over gRPC streams, or POST " + path + "/generate_stream.")); return; }
  let about;
  try {
    const answer = await fetch(path);
    about = await answer.json();
    if (!answer.ok) throw new Error(about.error);
  } catch (error) { place.replaceChildren(h("div", { class: "soft" }, "The model's inputs are not known: " + error.message)); return; }
  if (panel.key !== model.key) return;
  const fields = about.inputs.map((input) => {
    const shape = input.shape.map((size) => (size < 0 ? 1 : size)), count = shape.reduce((all, each) => all * each, 1);
    const value = input.datatype === "BYTES" ? "text" : input.datatype === "BOOL" ? true : 1;
    return { input, shape: h("input", { value: JSON.stringify(shape), "aria-label": "shape of " + input.name }), data: h("textarea", { rows: 2, spellcheck: "false", "aria-label": "values of " + input.name }, count <= 4096 ? JSON.stringify(Array(count).fill(value)) : "[]") };
  });
  const curl = h("pre", { "data-curl": "" }), said = h("pre", { "data-answer": "", hidden: "" }), send = h("button", null, "Send"), { endpoints, sends } = state.doc.server;
  const http = endpoints.http, base = http ? (http.tls ? "https://" : "http://") + location.hostname + ":" + http.port : "";
  const body = () => JSON.stringify({ inputs: fields.map(({ input, shape, data }) => ({ name: input.name, datatype: input.datatype, shape: JSON.parse(shape.value), data: JSON.parse(data.value) })) });
  const update = () => {
    try { curl.textContent = "curl -d " + quoted(body()) + " " + quoted(base + path + "/infer"); send.disabled = !sends; } catch (error) { curl.textContent = "not JSON yet: " + error.message; send.disabled = true; }
  };
  send.addEventListener("click", async () => {
    send.disabled = true;
    const begun = performance.now();
    try {
      const answer = await fetch(path + "/infer", { method: "POST", headers: { "Content-Type": "application/json", "Gpubridge-Page": "1" }, body: body() });
      const text = await answer.text();
      said.textContent = answer.status + " in " + span((performance.now() - begun) * 1000) + "\n" + (text.length > 20000 ? text.slice(0, 20000) + "…" : text);
    } catch (error) { said.textContent = String(error); }
    said.hidden = false;
    send.disabled = false;
  });
  for (const { shape, data } of fields) for (const each of [shape, data]) each.addEventListener("input", update);
  const unsaid = about.inputs.filter((input) => ["FP16", "BF16"].includes(input.datatype));
  place.replaceChildren(
    ...fields.map(({ input, shape, data }) => h("div", null, h("label", null, input.name + " (" + input.datatype + ", shape " + JSON.stringify(input.shape) + ")"), shape, data)),
    ...(unsaid.length ? [h("div", { class: "soft" }, "JSON cannot say " + unsaid[0].datatype + ": use a client library.")] : []),
    h("div", { class: "tools", css: { marginTop: "8px" } }, send, sends ? null : h("span", { class: "soft" }, "This page only reads: start the server with --allow-status-page-requests to send from here.")), said, curl);
  update();
}
