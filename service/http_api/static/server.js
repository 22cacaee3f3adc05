/** The server that the page came from: what it serves. */

import { byId, call, isGone, make, showError } from "./common.js";

/** What a chat template reads that can reason more or less. */
const EFFORT = /\b(reasoning_effort|enable_thinking)\b/;
/** Whether a template writes who speaks. One that only joins the texts was not made for chats. */
const CHAT = /\brole\b/;
/** How long the page waits to learn which tab it opens with. */
const WAIT_MS = 1000;
let isChosen = false;

/** Say what is served, and offer what it can do. With API keys set, only the first line is told to a caller without one. */
async function describeServer() {
  const { model, device, dtype } = await (await call("version")).json();
  byId("facts").textContent = [model, device, dtype].join(" · ");
  const { chat_template: template, model_max_length: context } = await (await call("tokenizer_info")).json();
  offer(template);
  byId("facts").textContent = [model, device, dtype, `${context} tokens of context`].join(" · ");
  const { data } = await (await call("v1/models")).json();
  byId("model").replaceChildren(...data.map(({ id }, i) => make("option", { value: i ? id : "" }, id)));
  byId("model-field").hidden = data.length < 2;
  for (const [name, value] of Object.entries(data[0].default_sampling)) byId(name).placeholder = value;
  if (!data[0].default_sampling.top_k) byId("top_k").placeholder = "all";
}

/** Offer what the chat template can do; the first time, the tab that fits it. */
function offer(template) {
  byId("mode-field").hidden = !template;
  byId("reasoning_effort-field").hidden = !EFFORT.test(template);
  if (!template) setMode("completions");
  else if (!isChosen && CHAT.test(template)) setMode("chat");
  isChosen = true;
}

function setMode(mode) {
  byId(`mode-${mode}`).checked = true;
  byId(`mode-${mode}`).dispatchEvent(new Event("change", { bubbles: true }));
}

/** Show the error of a call. */
export const fail = (error, place = byId("error")) => showError(place, error);

/** A call that matters shows its own error; only that nobody answers is told at once. */
export const describeQuietly = () => describeServer().catch((error) => isGone(error) && fail(error));

/** Show the page as soon as it is known what is served. */
export async function begin() {
  await Promise.race([describeQuietly(), new Promise((done) => setTimeout(done, WAIT_MS))]);
  byId("form").hidden = false;
}
