// openai for Node.
import OpenAI from "openai";
import { readFileSync } from "node:fs";

const url = process.argv[2], model = "storyteller", messages = [{ role: "user", content: "Once upon a time" }];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const assert = (is, what) => { if (!is) throw new Error(what) };
const checks = {
  async models() { const found = []; for await (const one of client.models.list()) found.push(one.id); assert(found[0] === model, found) },
  async completions() {
    const stream = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 8, seed: 1, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null;
    for await (const chunk of stream) { text += chunk.choices[0]?.text ?? ""; usage = chunk.usage ?? usage }
    const whole = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 8, seed: 1 });
    assert(text === whole.choices[0].text && usage.completion_tokens === 8, text);
  },
  async chat() {
    const whole = await client.chat.completions.create({ model, messages, max_completion_tokens: 8, seed: 1 });
    const runner = client.chat.completions.stream({ model, messages, max_completion_tokens: 8, seed: 1 });
    assert((await runner.finalContent()) === whole.choices[0].message.content, "another text");
  },
  async leaving() { const stream = await client.completions.create({ model, prompt: "a", max_tokens: 900, stream: true }); for await (const _ of stream) break },
  async errors() {
    try { await client.completions.create({ model, prompt: "a", temperature: -1 }) }
    catch (error) { assert(error instanceof OpenAI.BadRequestError && error.param === "temperature" && String(error.code) === "400", error); return }
    throw new Error("no error");
  },
};
const told = { versions: { openai: JSON.parse(readFileSync("node_modules/openai/package.json")).version, node: process.version }, checks: [] };
for (const [check, run] of Object.entries(checks)) {
  const outcome = { check, outcome: "ok" }, began = Date.now();
  try { await run() } catch (error) { outcome.outcome = "failed"; outcome.why = String(error.stack ?? error).slice(0, 1500) }
  outcome.seconds = (Date.now() - began) / 1000;
  told.checks.push(outcome);
}
console.log(JSON.stringify(told));
