// promptfoo, as people run it: a file of prompts, providers and assertions.
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

const apiBaseUrl = `${process.argv[2]}/v1`, model = "storyteller";
const assert = (is, what) => { if (!is) throw new Error(typeof what === "string" ? what : JSON.stringify(what)) };
const provider = (id, more) => ({ id: `openai:${id}:${model}`, config: { apiBaseUrl, apiKey: "none", temperature: 0, seed: 1, ...more } });
const environment = { ...process.env, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: `${process.cwd()}/home` };

// The results of an evaluation with one prompt.
function evaluated(providers, asserts) {
  const config = { prompts: ["Once upon a {{what}}"], providers, tests: [{ vars: { what: "time" }, assert: asserts }] };
  writeFileSync("promptfooconfig.json", JSON.stringify(config));
  const command = ["node_modules/.bin/promptfoo", "eval", "-c", "promptfooconfig.json", "--no-cache", "--no-table", "--no-progress-bar", "-o", "out.json"];
  const done = spawnSync("node", command, { env: environment, encoding: "utf8", timeout: 180000 });
  assert(done.status === 0 || done.status === 100, done.stderr + done.stdout); // 100: an assertion does not hold
  const { results } = JSON.parse(readFileSync("out.json")).results;
  for (const one of results) assert(one.success, one.error ?? one);
  return results;
}

const schema = { type: "object", properties: { happy: { type: "boolean" } }, required: ["happy"], additionalProperties: false };
const checks = {
  completions_and_chat() {
    const found = evaluated([provider("completion", { max_tokens: 8 }), provider("chat", { max_tokens: 8 })], [{ type: "javascript", value: "output.length > 3" }]);
    assert(found.length === 2 && found.every(one => one.response.tokenUsage.completion === 8), found);
  },
  structured() {
    const response_format = { type: "json_schema", json_schema: { name: "mood", strict: true, schema } };
    const [found] = evaluated([provider("chat", { max_tokens: 60, response_format })], [{ type: "is-json", value: schema }]);
    assert(typeof (found.response.output.happy ?? JSON.parse(found.response.output).happy) === "boolean", found.response);
  },
  tools() {
    const tools = [{ type: "function", function: { name: "look", parameters: { ...schema, properties: { happy: { enum: [true] } } } } }];
    const [found] = evaluated([provider("chat", { max_tokens: 60, tools, tool_choice: "required" })], [{ type: "is-valid-openai-tools-call" }]);
    assert(JSON.stringify(found.response.output).includes("look"), found.response);
  },
};
const told = { versions: { promptfoo: JSON.parse(readFileSync("node_modules/promptfoo/package.json")).version, node: process.version }, checks: [] };
for (const [check, run] of Object.entries(checks)) {
  const outcome = { check, outcome: "ok" }, began = Date.now();
  try { run() } catch (error) { outcome.outcome = "failed"; outcome.why = String(error.stack ?? error).slice(0, 1500) }
  outcome.seconds = (Date.now() - began) / 1000;
  told.checks.push(outcome);
}
console.log(JSON.stringify(told));
