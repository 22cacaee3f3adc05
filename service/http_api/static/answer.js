/** One answer on the page: its reasoning, its text as Markdown and as coloured tokens, its calls, its end, and what can be done. */

import { Parts } from "./calls.js";
import { copy, failure, make, sentence } from "./common.js";
import { elements, patch } from "./markdown.js";
import { Run, events, tokensOf } from "./stream.js";
import { TokenText } from "./tokens.js";

/** The least time between two renderings, and how much longer it is than one takes. */
const LEAST_MS = 40;
const SHARE = 4;

export class Answer {
  /** The request, and the ids of the prompt's tokens. */
  request = null;
  promptIds = undefined;
  run = new Run();
  #timer = 0;
  #cost = 0;

  /** `on` has what is done with an answer: choose(answer, at, text), retry(answer), goOn(answer), and in a chat
   * results(answer, messages) and explore(answer). */
  constructor(on, { isChat }) {
    Object.assign(this, { on, isChat });
    this.prose = make("div", { className: "prose", hidden: !isChat });
    const place = make("pre", { className: "text", role: "group", ariaLabel: "Text" });
    const panel = make("div", { className: "alternatives", role: "dialog", ariaLabel: "Alternatives", hidden: true });
    this.text = new TokenText(place, panel, (at, other) => on.choose(this, at, other));
    this.parts = new Parts((messages) => on.results(this, messages));
    this.words = make("div", { className: "words", hidden: isChat }, place, panel);
    this.figures = make("dl", { className: "figures" });
    this.problem = make("p", { className: "error", role: "alert", hidden: true });
    this.doings = make("p", { className: "doings", hidden: true });
    this.inside = make("div", { className: "inside", hidden: isChat }, this.figures);
    this.element = make("article", { className: "answer", ariaLabel: "Answer" }, this.parts.reasoning, this.prose, this.words,
      this.parts.calls, this.parts.status, this.problem, this.doings, this.inside);
    this.element.addEventListener("click", ({ target }) => this.#copyCode(target));
  }

  /** Begin, or go on. */
  start() {
    this.run = new Run();
    this.doings.hidden = this.problem.hidden = true;
    this.element.ariaBusy = "true";
    this.#show();
  }

  /** Take in a stream, to its end. */
  async follow(response, signal) {
    for await (const data of events(response.body)) {
      signal.throwIfAborted();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw failure(chunk.error, response);
      this.#take(chunk);
    }
    signal.throwIfAborted();
    const count = this.run.tokens === 1 ? "1 token" : `${this.run.tokens} tokens`;
    throw Object.assign(failure({ message: `The connection broke after ${count}` }, response), { isBroken: true });
  }

  #take(chunk) {
    this.run.read(chunk);
    for (const choice of chunk.choices) {
      this.promptIds ??= choice.prompt_token_ids;
      if (choice.delta && this.parts.add(choice.delta)) this.text.pass(tokensOf(choice));
      else this.text.add(choice.text ?? choice.delta.content ?? "", tokensOf(choice));
    }
    this.#show();
  }

  #show() {
    this.figures.replaceChildren(...this.run.figures(this.request?.body.seed));
    if (this.isChat) this.#timer ||= setTimeout(() => this.#render(), Math.max(LEAST_MS, SHARE * this.#cost));
  }

  #render() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const began = performance.now();
    const { content } = this;
    patch(this.prose, elements(content));
    this.prose.hidden = !content || !this.words.hidden;
    this.#cost = performance.now() - began;
  }

  /** The stream has ended: whole, stopped, or by an error. */
  end(error, reason) {
    this.text.end(Boolean(this.run.finish));
    this.parts.end(this.run.finish ?? reason);
    if (this.isChat) this.#render();
    this.problem.textContent = error ? sentence(error) : "";
    this.problem.hidden = !error;
    this.element.ariaBusy = "false";
    this.#offer(error);
  }

  /** Offer what can be done with it now. */
  #offer(error) {
    const { content, message } = this;
    const isOpen = content && !message.tool_calls && this.run.finish !== "stop";
    const goesOn = this.isChat ? isOpen : error?.isBroken && this.promptIds;
    const buttons = [
      this.isChat && content && button("Copy", () => copy(this.content, this.prose)),
      (this.isChat || error) && button("Retry", () => this.on.retry(this)),
      goesOn && button("Continue", () => this.on.goOn(this)),
      this.isChat && this.text.ids.length > 0 && this.#toggle(),
      this.isChat && this.promptIds && button("Explore attention", () => this.on.explore(this)),
    ].filter(Boolean);
    this.doings.replaceChildren(...buttons);
    this.doings.hidden = !buttons.length;
  }

  #toggle() {
    const toggle = button("Probabilities", () => {
      const isOpen = !this.words.hidden;
      this.words.hidden = this.inside.hidden = isOpen;
      this.prose.hidden = !isOpen || !this.content;
      toggle.ariaExpanded = `${!isOpen}`;
    });
    toggle.ariaExpanded = `${!this.words.hidden}`;
    return toggle;
  }

  #copyCode(target) {
    if (!target.matches(".copy")) return;
    const code = target.closest(".block").querySelector("code");
    copy(code.textContent, code);
  }

  /** Show a message that was kept: null where the question has no answer yet. */
  restore(message) {
    this.run.finish = "stop";
    if (message?.content) this.text.add(message.content, []);
    if (message) this.parts.restore(message);
    this.end(null, "");
  }

  /** The ids of its tokens so far. */
  get ids() {
    return this.text.ids;
  }

  get content() {
    return this.text.text;
  }

  /** The answer as a message of the conversation. */
  get message() {
    return this.parts.message(this.content);
  }

  /** Whether there is anything of it to keep. */
  get isEmpty() {
    const { content, reasoning_content: reasoning, tool_calls: calls } = this.message;
    return !content && !reasoning && !calls && !this.run.finish;
  }
}

const button = (name, onclick) => make("button", { type: "button", className: "quiet", onclick }, name);
