/** Arrows from the token that asks to the tokens that answer, over the text. */

const SVG = "http://www.w3.org/2000/svg";
const MOST = 16;
const LEAST = 0.01;

function draw(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const tip = () => draw("marker", { id: "tip", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 8, markerHeight: 8,
  markerUnits: "userSpaceOnUse", orient: "auto" }, draw("path", { d: "M0 0L8 4L0 8z" }));

/** Of two chips inside one box, a curve from the one that asks to the one that answers, over the line or between the lines. */
function curve(asks, answers) {
  const [x, y] = [asks.offsetLeft + asks.offsetWidth / 2, asks.offsetTop];
  if (asks === answers) return `M${x - 5} ${y}C${x - 14} ${y - 20} ${x + 14} ${y - 20} ${x + 5} ${y}`;
  const [toX, sameLine] = [answers.offsetLeft + answers.offsetWidth / 2, answers.offsetTop === y];
  const toY = answers.offsetTop + (sameLine ? 0 : answers.offsetHeight);
  const bend = sameLine ? Math.min(30, 10 + Math.abs(toX - x) / 6) : 24;
  return `M${x} ${y}C${x} ${y - bend} ${toX} ${sameLine ? toY - bend : toY + bend} ${toX} ${toY}`;
}

/** Draw the strongest links of chip `token` in `box`, which holds the chips, and shade each chip by its weight. */
export function drawLinks(box, chips, token, weights) {
  box.querySelector("svg")?.remove();
  chips.forEach((chip, i) => {
    chip.style.setProperty("--w", weights[i] ?? 0);
    chip.classList.toggle("asks", i === token);
  });
  const strongest = [...weights.entries()].filter(([, weight]) => weight >= LEAST).sort((a, b) => b[1] - a[1]).slice(0, MOST);
  const arrows = strongest.map(([to, weight]) => draw("path", {
    class: "link", d: curve(chips[token], chips[to]), "marker-end": "url(#tip)",
    "stroke-width": (0.75 + 4 * weight).toFixed(2), opacity: (0.25 + 0.75 * weight).toFixed(2), "data-from": token, "data-to": to,
  }));
  const size = { width: box.scrollWidth, height: box.scrollHeight };
  box.append(draw("svg", { "aria-hidden": "true", ...size }, draw("defs", {}, tip()), ...arrows));
}
