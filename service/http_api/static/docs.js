/** The HTTP API as /openapi.json describes it: each route with its fields, their bounds, examples and answers. */

import { byId, call, make } from "./common.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const MAX_DEPTH = 3;
const BOUNDS = {
  minimum: (value) => `≥ ${value}`,
  exclusiveMinimum: (value) => `> ${value}`,
  maximum: (value) => `≤ ${value}`,
  exclusiveMaximum: (value) => `< ${value}`,
  minLength: (value) => `characters ≥ ${value}`,
  maxLength: (value) => `characters ≤ ${value}`,
  minItems: (value) => `items ≥ ${value}`,
  maxItems: (value) => `items ≤ ${value}`,
  maxProperties: (value) => `entries ≤ ${value}`,
  pattern: (value) => `matches ${value}`,
};
let schema = {};

/** What a $ref points at, with whatever stands beside it. */
function resolve(node = {}) {
  if (!node.$ref) return node;
  const { $ref, ...beside } = node;
  const found = $ref.slice(2).split("/").reduce((at, part) => at?.[part.replaceAll("~1", "/").replaceAll("~0", "~")], schema);
  return { ...resolve(found), ...beside };
}

/** The alternatives of a schema, each of one type; null is left out, for it means absent everywhere. */
function alternatives(node) {
  const one = resolve(node);
  const several = one.anyOf ?? one.oneOf;
  if (several) return several.flatMap(alternatives);
  return [one.type].flat().filter((type) => type !== "null").map((type) => ({ ...one, type }));
}

/** A schema's type in words: "integer", "list of string", "one of "a", "b"". */
function kind(node) {
  const names = alternatives(node).map((one) => {
    if (one.enum) return `one of ${one.enum.map((value) => JSON.stringify(value)).join(", ")}`;
    if ("const" in one) return JSON.stringify(one.const);
    if (one.type === "array") return `list of ${one.items ? kind(one.items) : "anything"}`;
    return one.type ?? (one.properties ? "object" : "anything");
  });
  return [...new Set(names)].join(" or ");
}

/** Bounds and default of a field, as short remarks. */
function remarks(node) {
  const all = [resolve(node), ...alternatives(node)];
  const bounds = Object.entries(BOUNDS).flatMap(([name, words]) => all.filter((one) => name in one && !(Math.abs(one[name]) > 2 ** 53)).map((one) => words(one[name])));
  const preset = all.find((one) => (one.default ?? null) !== null);
  const example = all.find((one) => one.examples?.length);
  return [...new Set(bounds), ...(preset ? [`default ${JSON.stringify(preset.default)}`] : []),
    ...(example ? [`for example ${JSON.stringify(example.examples[0])}`] : [])];
}

/** Text with `code` between backticks. */
const inline = (text = "") => text.split("`").map((piece, i) => (i % 2 ? make("code", {}, piece) : piece));

const paragraphs = (text = "") => text.split(/\n\s*\n/).filter((part) => part.trim());

const prose = (text) => paragraphs(text).map((part) => make("p", {}, ...inline(part)));

/** One row for a field, and one for each field inside it. */
function field(name, node, required, depth) {
  const kinds = make("span", { className: "kind" }, [kind(node), ...(required ? ["required"] : []), ...remarks(node)].join(" · "));
  const row = make("div", { className: "field" }, make("code", {}, name), kinds, ...prose(resolve(node).description));
  return [row, ...fields(node, `${name}.`, depth + 1)];
}

/** Rows for the fields of an object, or of the objects in a list. */
function fields(node, prefix = "", depth = 0) {
  if (depth > MAX_DEPTH) return [];
  return alternatives(node).flatMap((one) => {
    if (one.type === "array" && one.items) return fields(one.items, prefix && `${prefix.slice(0, -1)}[].`, depth);
    const inner = Object.entries((one.type ?? "object") === "object" ? one.properties ?? {} : {});
    return inner.flatMap(([name, each]) => field(prefix + name, each, one.required?.includes(name), depth));
  });
}

/** The example of a body. */
const examples = ({ example }) =>
  (example === undefined ? [] : [make("h2", {}, "Example"), make("pre", {}, JSON.stringify(example, null, 2))]);

/** What a body holds, for each media type that it may have; of a stream, what each event holds. */
function content(node) {
  return Object.entries(resolve(node).content ?? {}).flatMap(([type, media]) => {
    const rows = fields(media.schema);
    return [make("p", { className: "hint" }, rows.length ? type : `${type}: ${kind(media.schema)}`),
      ...prose(resolve(media.schema).description), ...(rows.length ? [make("div", {}, ...rows)] : []), ...examples(media)];
  });
}

/** A call as curl makes it, with the example of its body; nothing where its body is no JSON. */
function sample(path, method, { requestBody }) {
  const media = requestBody && resolve(requestBody).content?.["application/json"];
  const body = media?.example;
  if (requestBody && body === undefined) return [];
  const words = ["curl", ...(method === "get" ? [] : ["-X", method.toUpperCase()]), decodeURI(new URL(`.${path}`, location.href).href),
    ...(byId("key").value ? ["-H", '"Authorization: Bearer $ATTEND_API_KEY"'] : []),
    ...(body === undefined ? [] : ["--json", `'${JSON.stringify(body).replaceAll("'", "'\\''")}'`])];
  return [make("h2", {}, "Example call"), make("pre", {}, words.join(" "))];
}

function fold(summary, ...inside) {
  return make("details", {}, make("summary", {}, ...summary), ...inside);
}

/** One way to call one path. */
function operation(path, method, node, shared = []) {
  const parameters = [...shared, ...(node.parameters ?? [])].map(resolve).flatMap((each) =>
    field(`${each.name} (${each.in})`, { description: each.description, ...resolve(each.schema) }, each.required, MAX_DEPTH));
  const answers = Object.entries(node.responses ?? {}).map(([status, answer]) =>
    fold([make("code", {}, status), make("small", {}, ...inline(resolve(answer).description))], ...content(answer)));
  const [short = node.summary, ...more] = paragraphs(node.description);
  return fold(
    [make("span", { className: "method" }, method.toUpperCase()), make("code", {}, path), make("small", {}, ...inline(short))],
    ...prose(more.join("\n\n")), ...(parameters.length ? [make("div", {}, ...parameters)] : []),
    ...(node.requestBody ? [make("h2", {}, "Body"), ...content(node.requestBody)] : []), ...sample(path, method, node),
    make("h2", {}, "Answers"), ...answers);
}

function show(described) {
  schema = described;
  byId("facts").textContent = `HTTP API · version ${schema.info.version}`;
  const routes = Object.entries(schema.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => operation(path, method, item[method], item.parameters)));
  byId("routes").replaceChildren(...prose(schema.info.description), ...routes);
}

async function load() {
  byId("error").hidden = true;
  try {
    show(await (await call("openapi.json")).json());
  } catch (error) {
    byId("error").hidden = false;
    byId("error").textContent = error.message;
  }
}

byId("key").addEventListener("change", load);
load();
