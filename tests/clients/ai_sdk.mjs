// Vercel's AI SDK: chats, responses and servers like this one; whole, streamed, with a tool, and an object by its schema.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const url = process.argv[2], name = "storyteller", prompt = "Once upon a time";
const assert = (is, what) => { if (!is) throw new Error(what) };
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "actorllm", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true });
const models = { chat: openai.chat(name), responses: openai.responses(name), compatible: compatible(name) };
const place = z.object({ city: z.enum(["Berlin", "Paris"]), warm: z.boolean() });
const checks = {};
for (const [kind, model] of Object.entries(models)) {
  const few = { model, prompt, maxOutputTokens: 16, maxRetries: 0 };
  checks[`text, ${kind}`] = async () => {
    const { text, usage } = await generateText(few);
    assert(text && usage.outputTokens === 16, text);
  };
  checks[`streamed, ${kind}`] = async () => {
    let text = "";
    const told = streamText({ ...few, onError: ({ error }) => { throw error } });
    for await (const piece of told.textStream) text += piece;
    assert(text && text === await told.text, text);
  };
  checks[`tools, ${kind}`] = async () => {
    const weather = tool({ description: "The weather", inputSchema: z.object({ city: z.enum(["Berlin", "Paris"]) }), execute: async ({ city }) => `sunny in ${city}` });
    const { toolResults } = await generateText({ ...few, maxOutputTokens: 300, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" }, stopWhen: stepCountIs(1) });
    assert(toolResults[0].output.startsWith("sunny in "), JSON.stringify(toolResults));
  };
  checks[`object, ${kind}`] = async () => {
    const told = await generateText({ ...few, maxOutputTokens: 300, output: Output.object({ schema: place }) });
    assert(place.parse(told.output), told.text);
  };
}
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const versions = Object.fromEntries(["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"].map((one) => [one, version(one)]));
const told = { versions: { ...versions, node: process.version }, checks: [] };
for (const [check, run] of Object.entries(checks)) {
  const outcome = { check, outcome: "ok" }, began = Date.now();
  try { await run() } catch (error) { outcome.outcome = "failed"; outcome.why = String(error.stack ?? error).slice(0, 1500) }
  outcome.seconds = (Date.now() - began) / 1000;
  told.checks.push(outcome);
}
console.log(JSON.stringify(told));
process.exit(0);
