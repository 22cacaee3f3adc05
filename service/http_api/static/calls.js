/** The parts of a chat's answer as they are parsed: its reasoning, and its calls, whose results are sent back. */

import { make } from "./common.js";

/** Whether text is a JSON object, as the arguments of a call that is sent back must be; no text stands for an empty one. */
function isObject(text) {
  try {
    const value = JSON.parse(text.trim() || "{}");
    return value !== null && typeof value === "object" && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** One call, as a card. `onresult()` is told that its result was given. */
class Call {
  arguments = "";
  result = null;
  isDone = false;

  constructor(id, name, onresult) {
    Object.assign(this, { id, name, onresult });
    this.shown = make("pre", { className: "arguments" });
    this.card = make("article", { className: "call", ariaLabel: `Call of ${name}`, ariaBusy: "true" },
      make("p", { className: "head" }, make("b", {}, name), make("code", {}, id)), this.shown);
  }

  /** Take in a piece of the arguments. */
  add(text) {
    this.arguments += text;
    this.shown.append(text);
  }

  get isWhole() {
    return this.isDone && isObject(this.arguments);
  }

  /** The arguments have ended. */
  end() {
    if (this.isDone) return;
    this.isDone = true;
    this.card.ariaBusy = "false";
    if (!this.isWhole) this.card.append(make("p", { className: "hint" }, "The arguments are no JSON object: this call cannot be answered."));
  }

  /** The answer has ended for this reason: a whole call waits for its result. */
  close(reason) {
    if (this.reason) return;
    this.reason = reason;
    this.end();
    this.card.firstChild.append(make("span", { className: "finish" }, reason));
    if (!this.isWhole) return;
    this.field = make("textarea", { rows: 2, spellcheck: false, autocapitalize: "off" });
    this.said = make("span", { className: "hint" });
    this.button = make("button", { type: "button", onclick: () => this.give() }, "Send back");
    this.button.ariaLabel = `Send back the result of ${this.name}`;
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.stopPropagation(); // elsewhere it generates
      this.give();
    });
    this.field.addEventListener("input", () => this.take(null));
    const give = make("p", { className: "give" }, this.button, this.said);
    this.card.append(make("label", {}, `Result of ${this.name}`, this.field), give);
  }

  /** A result, or that it is not given yet. */
  take(result) {
    this.result = result;
    this.said.textContent = result === null ? "" : "Kept until the other calls have theirs";
  }

  give() {
    this.take(this.field.value);
    this.onresult();
  }

  /** The result went to the model. */
  settle(result) {
    this.take(result);
    Object.assign(this.field, { value: result, readOnly: true });
    this.button.parentElement.remove();
  }
}

/** The parts of one answer, as elements. `onresults(messages)` gets the results of all calls, as messages, once there are all. */
export class Parts {
  #calls = [];
  #reasoning = "";
  #thoughts = make("pre", { className: "thoughts" });
  reasoning = make("details", { className: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this.#thoughts);
  calls = make("ol", { className: "calls", ariaLabel: "Tool calls", hidden: true });
  status = make("p", { className: "hint calls-status", role: "status" });

  constructor(onresults) {
    this.onresults = onresults;
  }

  /** The calls are cut off: the answer goes on from before them. */
  cut() {
    this.#calls = [];
    this.calls.replaceChildren();
    this.#say("");
  }

  /** Take in the delta of a streamed choice. Whether it is a part beside the content. */
  add({ content, reasoning_content: reasoning, tool_calls: calls = [] }) {
    if (reasoning) this.#reason(reasoning);
    for (const call of calls) this.#call(call);
    if (content || reasoning) this.#calls.at(-1)?.end();
    return Boolean(reasoning || calls.length);
  }

  #reason(text) {
    this.#reasoning += text;
    this.#thoughts.append(text);
    this.reasoning.hidden = false;
  }

  #call({ index, id, function: { name, arguments: piece } }) {
    if (name) {
      this.#calls.at(-1)?.end();
      this.#card(index, id, name);
      this.#say(`Calling ${name}`);
    }
    if (piece) this.#calls[index].add(piece);
  }

  #card(index, id, name) {
    this.#calls[index] = new Call(id, name, () => this.#send());
    this.calls.append(make("li", {}, this.#calls[index].card));
    this.calls.hidden = false;
    return this.#calls[index];
  }

  /** The answer has ended for this reason. */
  end(reason) {
    for (const call of this.#calls) call.close(reason);
    this.#tell();
  }

  get #whole() {
    return this.#calls.filter((call) => call.isWhole);
  }

  /** The calls that wait for their results. */
  get open() {
    return this.#whole.filter((call) => call.result === null);
  }

  /** Lead to the first call that has no result. Whether there is one. */
  ask() {
    this.open[0]?.field.focus();
    return this.open.length > 0;
  }

  /** Go on when every call has its result; until then lead to the next that has none. */
  #send() {
    this.#tell();
    if (!this.ask()) this.onresults(this.#whole.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })));
  }

  /** These messages of tools went to the model. */
  settle(results) {
    for (const { tool_call_id: id, content } of results) this.#calls.find((call) => call.id === id)?.settle(content);
    this.#tell();
  }

  #tell() {
    const open = this.open.map(({ name }) => name);
    if (this.#calls.length) this.#say(open.length ? `To be answered: ${open.join(", ")}` : "");
  }

  #say = (text) => Object.assign(this.status, { textContent: text });

  /** Show a message that was kept. */
  restore({ reasoning_content: reasoning, tool_calls: calls = [] }) {
    if (reasoning) this.#reason(reasoning);
    calls.forEach(({ id, function: { name, arguments: its } }, i) => this.#card(i, id, name).add(its));
    this.end("tool_calls");
  }

  /** The answer as a message of the conversation, with the calls that are whole. */
  message(content) {
    const calls = this.#whole.map(({ id, name, arguments: its }) => ({ id, type: "function", function: { name, arguments: its } }));
    return {
      role: "assistant",
      content: content || (calls.length ? null : ""),
      ...(this.#reasoning && { reasoning_content: this.#reasoning }),
      ...(calls.length && { tool_calls: calls }),
    };
  }
}
