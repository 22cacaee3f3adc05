/** The server that the page came from: what it serves, and whether it answers. */

import { byId, call, isGone, make, showError } from "./common.js";

const RETRY_MS = 1500;
/** What a chat template reads that can reason more or less. */
const EFFORT = /\b(reasoning_effort|enable_thinking)\b/;
/** Where it says that the server does not answer. */
const silenced = new Set();

/** Say what is served, and offer what it can do. With API keys set, only the first line is told to a caller without one. */
async function describeServer() {
  const { model, device, dtype } = await (await call("version")).json();
  byId("facts").textContent = [model, device, dtype].join(" · ");
  const { chat_template: template, model_max_length: context } = await (await call("tokenizer_info")).json();
  byId("facts").textContent = [model, device, dtype, `${context} tokens of context`].join(" · ");
  byId("mode-field").hidden = !template;
  byId("reasoning_effort-field").hidden = !EFFORT.test(template);
  if (!template) setMode("completions");
  const { data } = await (await call("v1/models")).json();
  byId("model").replaceChildren(...data.map(({ id }, i) => make("option", { value: i ? id : "" }, id)));
  byId("model-field").hidden = data.length < 2;
}

function setMode(mode) {
  byId("mode").value = mode;
  byId("mode").dispatchEvent(new Event("change", { bubbles: true }));
}

/** Show the error of a call. Where nobody answered, wait for the server, and say that it is back. */
export async function fail(error, place = byId("error")) {
  showError(place, error);
  if (!isGone(error)) return;
  silenced.add(place);
  if (silenced.size > 1) return; // somebody waits already
  while (!(await fetch("readyz").then((answer) => answer.ok, () => false))) await new Promise((done) => setTimeout(done, RETRY_MS));
  for (const each of silenced) showError(each, null);
  silenced.clear();
  byId("status").textContent = "The server is back";
  describeQuietly();
}

/** A call that matters shows its own error; only that nobody answers is told at once. */
export const describeQuietly = () => describeServer().catch((error) => isGone(error) && fail(error));
