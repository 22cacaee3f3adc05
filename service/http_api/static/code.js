/** A request as code that makes the same call: curl, Python with openai, Python with gRPC. */

import { byId } from "./common.js";
import { message, python } from "./protobuf.js";
import { written } from "./request.js";

const KEY = "ATTEND_API_KEY";

/** Fields that openai's own functions do not know: they go beside the others. */
const EXTRA = ["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "bad_words", "structured_outputs"];

/** Prints what a chat with tools streams. */
const CALLS = `for chunk in answer:
    delta = chunk.choices[0].delta
    print(delta.content or "", end="", flush=True)
    for call in delta.tool_calls or ():
        print(call.function.name or "", call.function.arguments or "", end="", flush=True)
`;

/** The same over gRPC. */
const TOOLS = `        for call in message.outputs[0].tool_calls:
            print(call.name, call.arguments, end="", flush=True)
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

  grpc(request) {
    const call = keyed() ? `request, metadata=[("authorization", "Bearer " + os.environ["${KEY}"])]` : "request";
    return `${keyed() ? "import os\n\n" : ""}import grpc\nfrom attend.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc\n\n`
      + `request = ${message(request)}\n`
      + `with grpc.insecure_channel(${python(`${location.hostname}:9000`)}) as channel:  # the default of --grpc-port: the page is not told another\n`
      + `    for message in rpc.GenerationServiceStub(channel).${request.chat ? "ChatStream" : "GenerateStream"}(${call}):\n`
      + "        print(message.outputs[0].text, end=\"\", flush=True)\n"
      + (request.body.tools ? TOOLS : "");
  },
};

const address = (path) => new URL(path, document.baseURI).href;

/** The request, as `asked` makes it, in one of the languages of the page. */
export const asCode = (language, request) => WRITERS[language](request);
