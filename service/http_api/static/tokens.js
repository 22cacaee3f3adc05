/** A text that grows token by token, each coloured by its probability; a token that is chosen shows what else it could have been. */

import { bars, make, rove, spoken, percent } from "./common.js";

/** How the server writes a token that is no whole characters. */
const PARTIAL = /^bytes:(\\x[0-9a-f]{2})+$/;

/** How many characters at the end of a text may be the beginning of a stop text: the server does not show them yet. */
const heldBack = (text, stops) => Math.max(0, ...stops.map((stop) => {
  let count = stop.length - 1;
  while (count && !text.endsWith(stop.slice(0, count))) count -= 1;
  return count;
}));

/** The text whose alternatives were opened last. */
let opened = null;

/** The text of one answer in `place`, and its tokens. `onchoose(at, text)` is called for another token at a place of the answer. */
export class TokenText {
  #waiting = "";
  #held = [];
  /** What the last piece was: "", "text", or "part", of an answer that has other parts than its text. */
  #last = "";
  /** Ids of all tokens of the answer, also of those that show no text. */
  ids = [];

  constructor(place, panel, onchoose) {
    Object.assign(this, { place, panel, onchoose });
    this.#listen();
  }

  /** The text of a completion goes on from its prompt. */
  begin(prompt) {
    if (prompt) this.place.append(make("span", { className: "prompt" }, prompt));
  }

  /** Take in a piece of text, and its tokens as `tokensOf` makes them; the one may run ahead of the other. */
  add(text, tokens) {
    this.#hold(tokens);
    if (text && this.#last !== "text") this.#begin(text);
    this.#waiting += text;
    this.#settle();
    if (!this.#held.length && this.#waiting) this.place.append(this.#waiting), this.#waiting = "";
  }

  /** Take in the tokens of a part that is not of the text, as the markers before it are not. */
  pass(tokens) {
    this.#hold(tokens);
    if (this.#waiting) this.#write(this.#waiting, this.#held);
    [this.#waiting, this.#held, this.#last] = ["", [], "part"];
  }

  #hold(tokens) {
    for (const token of tokens) {
      if (token.text !== undefined) this.#held.push({ ...token, at: this.ids.length });
      this.ids.push(token.id);
    }
  }

  /** Where the text begins with `text`, drop the tokens of markers before it: all but the last that have it, or may. */
  #begin(text) {
    const texts = this.#held.map((token) => (PARTIAL.test(token.text) ? "" : token.text));
    const isFirst = this.#last === "" && texts.join("").trimStart().startsWith(text.trimStart());
    this.#last = "text";
    if (isFirst) return;
    let from = texts.length - 1;
    while (from > 0 && !texts.slice(from).join("").includes(text)) from -= 1;
    this.#held.splice(0, texts.slice(from).join("").includes(text) ? from : texts.findLastIndex(Boolean) + 1);
  }

  /** What is left at the end. Where the answer is whole, a token without text ended it: shown, and no part of the text. */
  end(isWhole) {
    if (this.#last === "part") this.#held = [];
    if (this.#waiting) this.#write(this.#waiting, this.#held.splice(0));
    this.#waiting = "";
    if (!isWhole) return;
    for (const token of this.#held) if (!PARTIAL.test(token.text)) this.#write(token.text, [token], "unsaid");
    this.#held = [];
  }

  /** Tokens that showed no text are dropped, and what ended the text: it goes on from its last character. */
  trim() {
    for (const span of this.place.querySelectorAll(".unsaid")) span.remove();
    const last = this.#spans().at(-1)?.tokens.at(-1);
    if (last) this.ids.length = last.at + 1;
    this.#held = [];
  }

  /** The answer's text. */
  get text() {
    return [...this.place.childNodes].filter((node) => !node.matches?.(".prompt, .unsaid")).map((node) => node.textContent).join("");
  }

  /** Cut the answer before its token `at` and put another one there: {id, text, probability, top}. The stream goes on after it. */
  replace(at, chosen, stops) {
    const spans = this.#spans();
    let last = spans.findIndex((span) => span.tokens.at(-1).at >= at);
    const cut = spans[last];
    while (cut.nextSibling) cut.nextSibling.remove();
    cut.remove();
    this.ids.splice(at, Infinity, chosen.id);
    this.#held = [...cut.tokens.filter((token) => token.at < at), { ...chosen, at }];
    this.#waiting = PARTIAL.test(chosen.text) ? "" : chosen.text;
    const held = heldBack(this.text + this.#waiting, stops);
    for (last -= 1; this.#waiting.length < held && last >= 0; last -= 1) {
      this.#waiting = spans[last].textContent + this.#waiting;
      this.#held.unshift(...spans[last].tokens);
      spans[last].remove();
    }
    this.#waiting = this.#waiting.slice(0, Math.max(0, this.#waiting.length - held));
    this.#settle();
    this.close();
  }

  #spans = () => [...this.place.querySelectorAll(".scored")];

  #settle() {
    for (let found = this.#match(); found && this.#waiting; found = this.#match()) {
      this.#write(this.#waiting.slice(0, found[0]), this.#held.splice(0, found[1]));
      this.#waiting = this.#waiting.slice(found[0]);
    }
  }

  /** How much of the waiting text the first tokens wrote: [characters, tokens], or null while that is not known. */
  #match() {
    const whole = this.#held.findIndex((token) => !PARTIAL.test(token.text)); // before it stand parts of one character
    if (whole < 0) return null;
    const at = this.#waiting.indexOf(this.#held[whole].text);
    if (at < 0) return null;
    return whole === 0 ? [at + this.#held[0].text.length, 1] : [at, whole]; // a text may lack the space of its first token
  }

  #write(text, tokens, kind = "") {
    const probability = Math.min(...tokens.map((token) => token.probability));
    const span = make("span", { className: `scored ${kind}`, tokens, role: "button", tabIndex: -1 }, text);
    span.ariaLabel = `${spoken(text)}, ${percent(probability)}`;
    span.style.setProperty("--p", probability);
    if (!this.place.querySelector("[tabindex='0']")) span.tabIndex = 0;
    this.place.append(span);
  }

  /** Show the alternatives of a token beside it. */
  open(span) {
    opened?.close();
    opened = this;
    this.chosen = span;
    span.classList.add("current");
    this.panel.replaceChildren(...span.tokens.map((token) => bars(token.top, (i) => this.#button(token, token.top[i][0]))));
    this.panel.hidden = false;
    this.panel.style.setProperty("--x", `${span.offsetLeft}px`);
    this.panel.style.setProperty("--y", `${span.offsetTop + span.offsetHeight}px`);
    this.panel.querySelector("button:enabled")?.focus();
  }

  #button(token, text) {
    const button = make("button", { type: "button", onclick: () => this.onchoose(token.at, text) });
    if (text === token.text) button.ariaCurrent = "true";
    return button;
  }

  close() {
    this.chosen?.classList.remove("current");
    this.chosen = null;
    this.panel.hidden = true;
  }

  /** Let keyboard and pointer reach the tokens and their alternatives. */
  #listen() {
    const { place, panel } = this;
    rove(place, this.#spans);
    place.addEventListener("click", ({ target }) => target.tokens && this.open(target));
    place.addEventListener("keydown", (event) => {
      if (!event.target.tokens || (event.key !== "Enter" && event.key !== " ") || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.open(event.target);
    });
    rove(panel, () => [...panel.querySelectorAll("button")], () => 1);
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !opened?.chosen) return;
  const back = opened.chosen;
  opened.close();
  back.focus();
});
document.addEventListener("pointerdown", ({ target }) => {
  if (opened?.chosen && !opened.panel.contains(target) && !opened.place.contains(target)) opened.close();
});
