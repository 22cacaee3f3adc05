/** A request as code that makes the same call: curl, Python with openai, Python with gRPC. */

import { byId } from "./common.js";
import { written } from "./request.js";

const PYTHON_NAMES = { true: "True", false: "False", null: "None" };
const python = (value) => written(value, PYTHON_NAMES);
const KEY = "ATTEND_API_KEY";

/** Fields that openai's own functions do not know: they go beside the others. */
const EXTRA = ["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "bad_words", "structured_outputs"];

/** Where the messages of the proto keep a field of the HTTP API. */
const GRPC = {
  sampling: ["SamplingParameters", { top_p: "top_p", top_k: "top_k", min_p: "min_p", seed: "seed" }],
  decoding: ["DecodingParameters", {
    presence_penalty: "presence_penalty", frequency_penalty: "frequency_penalty", repetition_penalty: "repetition_penalty",
    bad_words: "bad_words", json: "json_schema", regex: "regex", choice: "choice", grammar: "grammar", json_object: "json_object",
  }],
  stopping: ["StoppingCriteria", { stop: "stop_strings", min_tokens: "min_tokens", ignore_eos: "ignore_eos" }],
};

/** Prints what a chat with tools streams. */
const CALLS = `for chunk in answer:
    delta = chunk.choices[0].delta
    print(delta.content or "", end="", flush=True)
    for call in delta.tool_calls or ():
        print(call.function.name or "", call.function.arguments or "", end="", flush=True)
`;

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const keyed = () => !byId("key-field").hidden;
const argumentsOf = (fields) => Object.entries(fields).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");

const WRITERS = {
  curl({ chat, body }) {
    const header = keyed() ? ` -H "Authorization: Bearer $${KEY}"` : "";
    const json = written({ ...body, stream: true });
    return `curl -N${header} --json ${shell(json)} ${shell(address(chat ? "v1/chat/completions" : "v1/completions"))}\n`;
  },

  python({ chat, body }) {
    const model = body.model ?? byId("model").selectedOptions[0]?.textContent ?? "";
    const own = Object.entries(body).filter(([name]) => !EXTRA.includes(name));
    const extra = Object.fromEntries(Object.entries(body).filter(([name]) => EXTRA.includes(name)));
    const fields = { ...Object.fromEntries(own), model, stream: true, ...(Object.keys(extra).length && { extra_body: extra }) };
    const [where, text] = chat ? ["chat.completions", "delta.content"] : ["completions", "text"];
    return `${keyed() ? "import os\n\n" : ""}from openai import OpenAI\n\n`
      + `client = OpenAI(base_url=${python(address("v1"))}, api_key=${keyed() ? `os.environ["${KEY}"]` : '"none"'})\n`
      + `answer = client.${where}.create(\n${argumentsOf(fields)})\n`
      + (body.tools ? CALLS : `for chunk in answer:\n    print(chunk.choices[0].${text} or "", end="", flush=True)\n`);
  },

  grpc({ chat, body }) {
    if (chat) return "# Chat is a route of HTTP only. Over gRPC, send the text that the chat template makes of the messages.\n";
    const { prompt, max_tokens: most, temperature, model, structured_outputs: kinds, ...rest } = body;
    const all = { ...rest, ...kinds };
    const plain = { text: prompt, max_tokens: most, temperature, adapter: model };
    const lines = Object.entries(plain).filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${python(value)}`);
    for (const [field, [message, names]] of Object.entries(GRPC)) {
      const given = Object.entries(names).filter(([name]) => name in all).map(([name, its]) => `${its}=${inGrpc(name, all[name])}`);
      if (given.length) lines.push(`${field}=pb.${message}(${given.join(", ")})`);
    }
    const call = keyed() ? `request, metadata=[("authorization", "Bearer " + os.environ["${KEY}"])]` : "request";
    return `${keyed() ? "import os\n\n" : ""}import grpc\nfrom attend.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc\n\n`
      + `request = pb.GenerateRequest(\n${lines.map((line) => `    ${line},\n`).join("")})\n`
      + `with grpc.insecure_channel(${python(`${location.hostname}:9000`)}) as channel:  # the default of --grpc-port: the page is not told another\n`
      + `    for message in rpc.GenerationServiceStub(channel).GenerateStream(${call}):\n`
      + "        print(message.outputs[0].text, end=\"\", flush=True)\n";
  },
};

const inGrpc = (name, value) => (name === "choice" ? `pb.DecodingParameters.Choices(choices=${python(value)})` : python(value));

const address = (path) => new URL(path, document.baseURI).href;

/** The request, as `asked` makes it, in one of the languages of the page. */
export const asCode = (language, request) => WRITERS[language](request);
