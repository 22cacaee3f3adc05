/** A request as Python that makes the message of gRPC. */

import { written } from "./request.js";

const PYTHON_NAMES = { true: "True", false: "False", null: "None" };

/** A value as Python writes it. */
export const python = (value) => written(value, PYTHON_NAMES);

/** Where the messages of the proto keep a field of the HTTP API. */
const GROUPS = {
  sampling: ["SamplingParameters", { top_p: "top_p", top_k: "top_k", min_p: "min_p", seed: "seed" }],
  decoding: ["DecodingParameters", {
    presence_penalty: "presence_penalty", frequency_penalty: "frequency_penalty", repetition_penalty: "repetition_penalty",
    bad_words: "bad_words", json: "json_schema", regex: "regex", choice: "choice", grammar: "grammar", json_object: "json_object",
  }],
  stopping: ["StoppingCriteria", { stop: "stop_strings", min_tokens: "min_tokens", ignore_eos: "ignore_eos" }],
};

/** The fields of a message that are there, as named arguments: of code, or of values. */
const named = (fields, write = (code) => code) =>
  Object.entries(fields).filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${write(value)}`);
const given = (fields) => named(fields, python);
const made = (name, fields) => `pb.${name}(${fields.join(", ")})`;

const callOf = ({ id, function: { name, arguments: its } }) => made("ToolCall", given({ id, name, arguments: its }));

function messageOf({ role, content, reasoning_content: reasoning, tool_calls: calls, tool_call_id: answered }) {
  const plain = given({ role, content: content ?? undefined, reasoning, tool_call_id: answered });
  return made("ChatMessage", [...plain, ...named({ tool_calls: calls && list(calls.map(callOf)) })]);
}

const toolOf = ({ function: { name, description, parameters, strict } }) =>
  made("Tool", given({ name, description, parameters: parameters && written(parameters), strict: strict || undefined }));

const list = (all) => `[\n${all.map((each) => `        ${each},\n`).join("")}    ]`;

/** What a conversation asks for beside what a completion does. */
function conversation({ messages, tools, tool_choice: choice, parallel_tool_calls: parallel, ...rest }) {
  const chosen = typeof choice === "object" ? { tool_name: choice.function.name } : { tool_choice: choice };
  const flags = given({ ...chosen, parallel_tool_calls: parallel, reasoning_effort: rest.reasoning_effort,
    continue_final_message: rest.continue_final_message });
  return [...named({ messages: list(messages.map(messageOf)), tools: tools && list(tools.map(toolOf)) }), ...flags];
}

/** The message of a request, as code. */
export function message({ chat, body }) {
  const { prompt, max_tokens: most, temperature, model, structured_outputs: kinds, ...rest } = body;
  const all = { ...rest, ...kinds };
  const lines = [...(chat ? conversation(body) : given({ text: prompt })), ...given({ max_tokens: most, temperature, adapter: model })];
  for (const [field, [name, names]] of Object.entries(GROUPS)) {
    const its = Object.entries(names).filter(([one]) => one in all).map(([one, ours]) => `${ours}=${valueOf(one, all[one])}`);
    if (its.length) lines.push(`${field}=${made(name, its)}`);
  }
  return `pb.${chat ? "ChatRequest" : "GenerateRequest"}(\n${lines.map((line) => `    ${line},\n`).join("")})`;
}

const valueOf = (name, value) => (name === "choice" ? `pb.DecodingParameters.Choices(choices=${python(value)})` : python(value));
