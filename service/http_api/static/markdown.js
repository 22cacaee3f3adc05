/** The blocks of Markdown as elements. No text becomes markup: each element is made here. So HTML stays text, an image is a
 * link to it, and a link leads to an address that is written out, or writes mail. Left as text: reference links, and headings
 * that are underlined. */

import { make } from "./common.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const DELIMITER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const CELL = /((?:\\.|[^\\|])*)(?:\||$)/gs;
/** Blocks that are deeper are text. */
const MAX_DEPTH = 20;

/** The elements of a text. */
export const elements = (text) => blocks(text.replaceAll("\t", "    ").split("\n"), make("div"), 0, false);

/** Append the blocks of `lines` to `place`. A tight list's items have their text without a paragraph. */
function blocks(lines, place, depth, isTight) {
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) at += 1;
    else at = block(lines, at, place, depth, isTight);
  }
  return place;
}

/** Append the block that begins at a line; the line after it. */
function block(lines, at, place, depth, isTight) {
  const line = lines[at];
  const isDeep = depth >= MAX_DEPTH;
  let found = null;
  if ((found = FENCE.exec(line))) return fence(lines, at, place, found);
  if ((found = HEADING.exec(line))) place.append(make(`h${found[1].length}`, {}, ...inline(title(found[2] ?? ""))));
  else if (RULE.test(line)) place.append(make("hr"));
  else if (QUOTE.test(line) && !isDeep) return quote(lines, at, place, depth);
  else if (ITEM.test(line) && !isDeep) return list(lines, at, place, depth);
  else if (line.includes("|") && DELIMITER.test(lines[at + 1] ?? "")) return table(lines, at, place);
  else return paragraph(lines, at, place, isTight);
  return at + 1;
}

/** A heading's text without the marks that may end it. */
function title(text) {
  const own = text.trim();
  let end = own.length;
  while (own[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(own[end - 1]) ? own.slice(0, end).trimEnd() : own;
}

function fence(lines, at, place, [, indent, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end += 1;
  const margin = new RegExp(`^ {0,${indent.length}}`);
  place.append(codeBlock(lines.slice(at + 1, end).map((line) => line.replace(margin, "")).join("\n"), language));
  return end + 1;
}

function quote(lines, at, place, depth) {
  let end = at + 1;
  while (end < lines.length && (QUOTE.test(lines[end]) || continues(lines[end - 1].replace(QUOTE, ""), lines[end]))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  place.append(blocks(inner, make("blockquote"), depth + 1, false));
  return end;
}

/** A list: items of one kind of mark. What is indented below an item belongs to it, and so does a paragraph that goes on. */
function list(lines, at, place, depth) {
  const kind = ITEM.exec(lines[at])[2];
  const items = [];
  let isTight = true;
  let end = at;
  for (let found; (found = ITEM.exec(lines[end] ?? "")) && found[2].at(-1) === kind.at(-1) && !RULE.test(lines[end]);) {
    const mark = found[0].length;
    const width = mark + Math.min(4, Math.max(1, lines[end].slice(mark).search(/\S|$/)));
    const item = [lines[end].slice(width)];
    for (end += 1; end < lines.length; end += 1) {
      if (!lines[end].trim()) item.push("");
      else if (lines[end].search(/\S/) >= width) item.push(lines[end].slice(width));
      else if (!ITEM.test(lines[end]) && continues(item.at(-1), lines[end])) item.push(lines[end].trimStart());
      else break;
    }
    const text = item.join("\n").trimEnd();
    const hasGap = /\n[ \t]*\n/.test(text) || (!item.at(-1) && ITEM.test(lines[end] ?? ""));
    isTight &&= !hasGap || (text === "" && items.length === 0 && end >= lines.length);
    items.push(text.split("\n"));
  }
  const isOrdered = kind.length > 1;
  const made = make(isOrdered ? "ol" : "ul", isOrdered ? { start: Number.parseInt(kind, 10) } : {});
  for (const item of items) made.append(blocks(item, make("li"), depth + 1, isTight));
  place.append(made);
  return end;
}

function table(lines, at, place) {
  const aligned = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  const row = (line, tag) => {
    const own = cells(line);
    const styles = aligned.map((align) => (align ? { style: `text-align:${align}` } : {}));
    return make("tr", {}, ...styles.map((style, i) => make(tag, style, ...inline(own[i] ?? ""))));
  };
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const made = make("table", {}, make("thead", {}, row(lines[at], "th")), ...(body.length ? [make("tbody", {}, ...body)] : []));
  place.append(make("div", { className: "wide", tabIndex: 0 }, made));
  return end;
}

const cells = (line) => [...line.trim().replace(/^\||\|$/g, "").matchAll(CELL)].slice(0, -1).map((cell) => cell[1].trim());

function paragraph(lines, at, place, isTight) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  const made = inline(lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd());
  place.append(...(isTight ? made : [make("p", {}, ...made)]));
  return end;
}

/** True if a line ends the paragraph before it. A mark without text does not: it may be a word that begins. */
function interrupts(line) {
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const found = ITEM.exec(line);
  return Boolean(found && line.slice(found[0].length).trim() && (found[2].length === 1 || Number.parseInt(found[2], 10) === 1));
}

/** True if a line goes on with the paragraph of a quote or an item, whose last line is `before`. */
const continues = (before, line) => !interrupts(before) && !ITEM.test(before) && !interrupts(line) && !ITEM.test(line);

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
