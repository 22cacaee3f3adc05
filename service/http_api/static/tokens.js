/** A text that grows token by token, each coloured by its probability, with the alternatives of the one pointed at. */

import { make } from "./common.js";

/** How the server writes a token that is no whole characters. */
const PARTIAL = /^bytes:(\\x[0-9a-f]{2})+$/;

/** Where a streamed answer goes: `add(text, tokens)` for each piece, `end()` after the last. */
export function probabilityText(place, panel) {
  let [waiting, held, current] = ["", [], null];

  function write(text, tokens) {
    if (!tokens.length) return place.append(text);
    const span = make("span", { className: "scored", tokens }, text);
    span.style.setProperty("--p", Math.min(...tokens.map((token) => token.probability)));
    place.append(span);
  }

  /** How much of the waiting text the first tokens wrote: [characters, tokens], or null while that is not known. */
  function match() {
    const whole = held.findIndex((token) => !PARTIAL.test(token.text)); // before it stand parts of one character
    if (whole < 0) return null;
    const at = waiting.indexOf(held[whole].text);
    if (at < 0) return null;
    return whole === 0 ? [at + held[0].text.length, 1] : [at, whole]; // a token alone may lack the space before it
  }

  function point(span) {
    current?.classList.remove("current");
    current = span;
    panel.hidden = !span;
    if (!span) return;
    span.classList.add("current");
    panel.replaceChildren(...span.tokens.map(table));
  }

  function step(event) {
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const span = next && (current ? current[next] : place.querySelector(".scored"));
    if (span?.tokens) point(span);
    if (event.key === "Escape") point(null);
    if (span) event.preventDefault();
  }

  place.onpointerover = place.onclick = ({ target }) => target.tokens && point(target);
  place.onkeydown = step;
  point(null);
  return {
    add(text, tokens) {
      if (!tokens.length && !held.length) return place.append(text);
      waiting += text;
      held.push(...tokens);
      for (let found = match(); found && waiting; found = match()) {
        write(waiting.slice(0, found[0]), held.splice(0, found[1]));
        waiting = waiting.slice(found[0]);
      }
    },
    end() {
      if (waiting) write(waiting, held);
      [waiting, held] = ["", []];
    },
  };
}

/** The probabilities of the tokens that could have stood in one place, the chosen one marked. */
function table({ text, probability, top }) {
  const rows = top.some(([other]) => other === text) ? top : [[text, probability], ...top];
  return make("ol", {}, ...rows.map(([other, value]) => {
    const row = make("li", { className: other === text ? "chosen" : "" }, make("code", {}, visible(other)));
    row.style.setProperty("--p", value);
    row.append(percent(value));
    return row;
  }));
}

/** Line ends and tabs as one writes them in a string. */
const visible = (text) => text.replace(/[\n\r\t]/g, (character) => JSON.stringify(character).slice(1, -1));

const percent = (value) => `${(value * 100).toFixed(value < 0.0995 ? 2 : 1)} %`;
