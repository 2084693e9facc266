// The chat: a conversation through the model's template, or plain text that the model goes on from. Uses $, root and headers of live.js.
"use strict";
let under_way = null, conversation = [];

function parameters() {
  const body = { max_tokens: +$("tokens").value, temperature: +$("temperature").value };
  if ($("top-p").value !== "") body.top_p = +$("top-p").value;
  if ($("seed").value !== "") body.seed = +$("seed").value;
  if (+$("objective").value > 0) body.slo = +$("objective").value / 1000;
  return body;
}
function bodyOf(messages) {
  if ($("way").value === "text") return { prompt: messages[messages.length - 1].content, ...parameters() };
  const system = $("system").value.trim();
  return { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages], ...parameters() };
}
const pathOf = () => $("way").value === "text" ? "/v1/completions" : "/v1/chat/completions";

function block(role, text) {
  const message = document.createElement("div"), shown = document.createElement("span");
  message.className = "message " + role; message.setAttribute("role", "group"); message.setAttribute("aria-label", role);
  shown.textContent = text; message.append(shown); $("answer").append(message);
  return shown.firstChild ?? shown.appendChild(document.createTextNode(""));
}
function draw() {
  $("answer").textContent = "";
  for (const { role, content } of conversation) block(role, content);
}

// The same request for a terminal and a program
const quoted = text => "'" + text.replaceAll("'", "'\\''") + "'";
function python(value) {
  if (value === null) return "None";
  if (Array.isArray(value)) return "[" + value.map(python).join(", ") + "]";
  if (typeof value === "object") return "{" + Object.entries(value).map(([name, one]) => JSON.stringify(name) + ": " + python(one)).join(", ") + "}";
  return JSON.stringify(value);
}
function showCode() {
  const pending = { role: "user", content: $("prompt").value }, last_ = conversation[conversation.length - 1];
  const body = bodyOf(last_?.role === "user" ? conversation : [...conversation, pending]), url = location.origin + root;
  const auth = key ? ` -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
  $("curl").textContent = `curl ${quoted(url + pathOf())} -H 'content-type: application/json'${auth} -d ${quoted(JSON.stringify(body))}`;
  const { slo, ...rest } = body, call = "messages" in body ? "chat.completions" : "completions";
  const name = $("what").dataset.model ?? "model", lines = Object.entries({ model: name, ...rest }).map(([field, value]) => `    ${field}=${python(value)},`);
  if (slo !== undefined) lines.push(`    extra_body={"slo": ${slo}},`);
  const token = key ? `os.environ["OPENAI_API_KEY"]` : `"none"`, imports = key ? "import os\n\n" : "";
  $("python").textContent = `${imports}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(url + "/v1")}, api_key=${token})\nanswer = client.${call}.create(\n${lines.join("\n")}\n)`;
}
async function copy(event) {
  const button = event.currentTarget, text = $(button.dataset.copies).textContent;
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied" } catch {
    const range = document.createRange(); range.selectNodeContents($(button.dataset.copies)); getSelection().removeAllRanges(); getSelection().addRange(range);
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { button.textContent = "Copy " + (button.dataset.copies === "curl" ? "curl" : "Python") }, 2000);
}

function figures(began, first, tokens, told) {
  if (first === null) return "";
  const passed = (performance.now() - first) / 1000, parts = [`first token ${(first - began).toFixed(0)} ms`];
  if (passed > .05 && tokens > 1) parts.push(`${((tokens - 1) / passed).toFixed(0)} tokens/s`);
  if (told) {
    parts.push(`${told.usage.completion_tokens} tokens`);
    const met = told.metrics?.slo_met;
    if (met != null) parts.push(met ? "objective kept" : "objective missed");
  }
  return parts.join(" · ");
}

async function send() { // the conversation ends with a message of the user
  under_way = new AbortController();
  $("go").textContent = "Stop"; $("go").className = "stop"; $("figures").className = ""; $("figures").textContent = ""; $("again").disabled = true;
  draw(); showCode();
  const shown = block("assistant", ""), answer = { role: "assistant", content: "" }, began = performance.now(), body = bodyOf(conversation), path = pathOf();
  let first = null, tokens = 0, buffered = "", told = null;
  try {
    const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_metrics: true };
    const response = await fetch(root + path, { method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(asked), signal: under_way.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read(); if (done) break;
      buffered += value; const blocks = buffered.split("\n\n"); buffered = blocks.pop();
      for (const one of blocks) {
        if (!one.startsWith("data: ") || one === "data: [DONE]") continue;
        const tree = JSON.parse(one.slice(6)); if (tree.error) throw new Error(tree.error.message);
        if (tree.usage) told = tree;
        for (const choice of tree.choices) {
          const text = choice.text ?? choice.delta.content ?? "", thought = choice.delta?.reasoning ?? "";
          if (choice.delta?.role && !text && !thought) continue; // the opening has no token
          first ??= performance.now(); tokens++; answer.content += text; shown.data += text || thought;
        }
      }
      $("figures").textContent = figures(began, first, tokens, told);
      $("answer").scrollTop = $("answer").scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") $("figures").textContent += " · stopped"; else { $("figures").textContent = error.message; $("figures").className = "bad" }
  }
  if (answer.content) conversation.push(answer); else if (!tokens) shown.parentNode.parentNode.remove();
  under_way = null; $("go").textContent = "Send"; $("go").className = ""; $("again").disabled = conversation.length === 0;
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (under_way) { under_way.abort(); return }
  const content = $("prompt").value;
  if (!content) return;
  if ($("way").value === "text") conversation = [];
  else if (conversation[conversation.length - 1]?.role === "user") conversation.pop(); // it was not answered
  conversation.push({ role: "user", content });
  send();
});
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit() });
$("again").addEventListener("click", () => {
  if (under_way || !conversation.length) return;
  if (conversation[conversation.length - 1].role === "assistant") conversation.pop();
  send();
});
$("clear").addEventListener("click", () => {
  if (under_way) under_way.abort();
  conversation = []; draw(); $("figures").textContent = ""; $("figures").className = ""; $("again").disabled = true; $("prompt").focus(); showCode();
});
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", copy);
$("code").addEventListener("toggle", showCode);
$("form").addEventListener("input", showCode);
$("to-docs").href = root + "/docs"; $("to-metrics").href = root + "/metrics";
look(); percentiles();
