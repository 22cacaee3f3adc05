/** The Markdown that models write, as elements: code, headings, lists, quotes, tables, bold text, links. The rest stays text, and
 * so does HTML: each element is made here, and a link leads to an address that is written out. */

import { make } from "./common.js";

const FENCE = /^ *(`{3,}|~{3,}) *([^`\s]*)/;
const HEADING = /^(#{1,6}) +(.*)/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)]) +(.*)/;
const QUOTE = /^ *> ?/;
const KINDS = { fence: FENCE, heading: HEADING, rule: /^ *([-*_])(?: *\1){2,} *$/, item: ITEM, quote: QUOTE, row: /^ *\|/, text: /\S/ };
/** Code, strong and emphasized text, a link, an address. None of them looks beyond the next mark of its kind. */
const INLINE = new RegExp([/(`{1,3})([^`\n]+)\1/, /\*\*([^*\n]+)\*\*/, /\*([^*\s](?:[^*\n]*[^*\s])?)\*(?!\*)/,
  /\[([^[\]\n]*)\]\((https?:\/\/[^\s()]+)[^()\n]*\)/, /(https?:\/\/[^\s<>()]*[^\s<>().,:;!?'"*_])/].map(({ source }) => source).join("|"), "g");

const kindOf = (line) => Object.keys(KINDS).find((kind) => KINDS[kind].test(line));

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const { 0: all, index, 2: code, 3: strong, 4: em, 5: label, 6: target, 7: bare } of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, index));
    end = index + all.length;
    if (code) nodes.push(make("code", {}, code));
    else if (strong || em) nodes.push(make(strong ? "strong" : "em", {}, strong ?? em));
    else nodes.push(make("a", { href: target ?? bare, target: "_blank", rel: "noopener noreferrer" }, label || (target ?? bare)));
  }
  return [...nodes, text.slice(end)].filter(Boolean);
}

/** The elements of a text. */
export function elements(text) {
  const place = make("div");
  const lines = text.split("\n");
  for (let at = 0; at < lines.length;) {
    const kind = kindOf(lines[at]);
    let end = at + 1;
    if (kind === "fence") while (end < lines.length && !lines[end].trim().startsWith(FENCE.exec(lines[at])[1])) end += 1;
    else if (kind !== "heading" && kind !== "rule") while (end < lines.length && kindOf(lines[end]) === kind) end += 1;
    if (kind) place.append(block(kind, lines.slice(at, end)));
    at = end + (kind === "fence");
  }
  return place;
}

/** The element of lines of one kind. */
function block(kind, lines) {
  if (kind === "fence") return codeBlock(lines.slice(1).join("\n"), FENCE.exec(lines[0])[2]);
  if (kind === "rule") return make("hr");
  if (kind === "heading") {
    const [, { length }, text] = HEADING.exec(lines[0]);
    return make(`h${length}`, {}, ...inline(text));
  }
  if (kind === "item") {
    const items = lines.map((line) => ITEM.exec(line)).map(([, indent, number, text]) =>
      make("li", { ...(number && { value: number }), style: `margin-left: ${indent.length}ch` }, ...inline(text)));
    return make(ITEM.exec(lines[0])[2] ? "ol" : "ul", {}, ...items);
  }
  if (kind === "row") return table(lines);
  const paragraph = make("p", {}, ...inline(lines.map((line) => (kind === "quote" ? line.replace(QUOTE, "") : line)).join("\n")));
  return kind === "quote" ? make("blockquote", {}, paragraph) : paragraph;
}

function table(lines) {
  const rows = lines.filter((line) => !/^[\s|:-]+$/.test(line)).map((line, i) =>
    make("tr", {}, ...line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => make(i ? "td" : "th", {}, ...inline(cell.trim())))));
  return make("div", { className: "wide", tabIndex: 0 }, make("table", {}, ...rows));
}

function codeBlock(text, language) {
  const copy = make("button", { type: "button", className: "quiet copy" }, "Copy");
  const head = make("div", { className: "head" }, make("span", {}, language || "code"), copy);
  return make("div", { className: "block" }, head, make("pre", { tabIndex: 0 }, make("code", {}, text.replace(/\n$/, ""))));
}

/** Make the children of `old` like those of `fresh`. What is the same stays the element that it is: nothing jumps, and a
 * selection holds. */
export function patch(old, fresh) {
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, i) => {
    const its = before[i];
    if (!its) old.append(node);
    else if (its.isEqualNode(node)) return;
    else if (its.nodeType === Node.TEXT_NODE && node.data?.startsWith(its.data)) its.appendData(node.data.slice(its.length));
    else if (its.cloneNode().isEqualNode(node.cloneNode())) patch(its, node);
    else its.replaceWith(node);
  });
  for (const rest of before.slice(after.length)) rest.remove();
}
