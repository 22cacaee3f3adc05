// JavaScript clients on one server: each case prints one JSON line that test_javascript.py reads. `node clients.mjs URL MODEL`.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const prompt = "def f(";
const messages = [{ role: "user", content: prompt }];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const schema = z.object({ zone: z.enum(["UTC", "CET"]) });

async function joined(stream, text) {
  let whole = "";
  for await (const event of stream) whole += text(event) ?? "";
  return whole;
}

// What models of the package `ai` do: a text, the same streamed, and a tool that is called and answered.
async function ofAi(made) {
  const given = { model: made, prompt, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
  const whole = await generateText(given);
  const streamed = await joined(streamText(given).textStream, (text) => text);
  const called = [];
  const now = tool({ description: "The time.", inputSchema: schema, execute: ({ zone }) => (called.push(zone), "noon") });
  const worked = await generateText({
    ...given,
    tools: { now },
    toolChoice: "required",
    stopWhen: stepCountIs(2),
    maxOutputTokens: 60,
    providerOptions: {
      openai: { parallelToolCalls: false },
      anthropic: { disableParallelToolUse: true },
      attend: { parallel_tool_calls: false },
    },
    prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
  });
  return { whole: whole.text, streamed, called, steps: worked.steps.length, tokens: whole.usage.outputTokens };
}

const cases = {
  "openai chat": async () => {
    const given = { model, messages, temperature: 0, max_tokens: 12 };
    const whole = await openai.chat.completions.create(given);
    const stream = await openai.chat.completions.create({ ...given, stream: true });
    return { whole: whole.choices[0].message.content, streamed: await joined(stream, (e) => e.choices[0]?.delta?.content) };
  },
  "openai responses": async () => {
    const given = { model, input: prompt, temperature: 0, max_output_tokens: 12 };
    const whole = await openai.responses.create(given);
    const stream = openai.responses.stream(given);
    const streamed = await joined(stream, (e) => (e.type === "response.output_text.delta" ? e.delta : ""));
    return { whole: whole.output_text, streamed, final: (await stream.finalResponse()).output_text };
  },
  "anthropic messages": async () => {
    const given = { model, messages, max_tokens: 12, temperature: 0 };
    const whole = await anthropic.messages.create(given);
    const stream = anthropic.messages.stream(given);
    const final = await stream.finalMessage();
    return { whole: whole.content[0].text, streamed: final.content[0].text };
  },
  "ai, openai responses": () => ofAi(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(model)),
  "ai, openai chat": () => ofAi(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat(model)),
  "ai, openai-compatible": () => ofAi(createOpenAICompatible({ name: "attend", baseURL: `${url}/v1` })(model)),
  "ai, anthropic": () => ofAi(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model)),
};

for (const [name, run] of Object.entries(cases)) {
  try {
    console.log(JSON.stringify({ name, ...(await run()) }));
  } catch (error) {
    console.log(JSON.stringify({ name, error: String(error), body: error?.responseBody ?? error?.error ?? null }));
  }
}
