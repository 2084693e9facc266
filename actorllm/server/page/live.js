"use strict";
const $ = id => document.getElementById(id), root = location.pathname.replace(/\/$/, ""), history_ = [], steps = [];
const PERIOD = 1000, HOUR = 3600;
let KEPT = 120; // seconds that the curves show
let last = null, skew = null, key = sessionStorage.getItem("actorllm-key") || "", after = {}, timer = null, asking = false;
const headers = () => key ? { authorization: "Bearer " + key } : {};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seconds = s => s == null ? "–" : s < 1 ? (s * 1000).toFixed(s < .01 ? 1 : 0) + " ms" : s < 100 ? s.toFixed(1) + " s" : Math.round(s / 60) + " min";
const big = n => n >= 1e6 ? (n / 1e6).toFixed(1) + "M" : n >= 1e4 ? (n / 1e3).toFixed(1) + "k" : String(Math.round(n));
const put = (id, value, unit = "") => { $(id).textContent = value; if (unit) { const s = document.createElement("small"); s.textContent = " " + unit; $(id).append(s) } };

function canvas(id) {
  const c = $(id), ratio = devicePixelRatio || 1, w = c.clientWidth, h = c.clientHeight;
  if (c.width !== Math.round(w * ratio) || c.height !== Math.round(h * ratio)) { c.width = Math.round(w * ratio); c.height = Math.round(h * ratio) }
  const g = c.getContext("2d"); g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, w, h);
  return [g, w, h];
}
function spark(id, key, color, top) {
  const [g, w, h] = canvas(id), values = history_.slice(-KEPT).map(x => x[key]);
  const most = top ?? Math.max(1e-9, ...values.filter(v => v != null)) * 1.1;
  g.strokeStyle = css(color); g.lineWidth = 1.5; g.lineJoin = "round"; g.beginPath();
  let pen = false, first = 0, x = 0;
  values.forEach((v, i) => { if (v == null) { pen = false; return } x = w - 1 - (values.length - 1 - i) * (w - 2) / (KEPT - 1); const y = h - 1.5 - (h - 3) * Math.min(1, v / most); if (pen) g.lineTo(x, y); else { g.moveTo(x, y); first = x } pen = true });
  g.stroke();
  if (pen) { g.lineTo(x, h); g.lineTo(first, h); g.globalAlpha = .1; g.fillStyle = css(color); g.fill(); g.globalAlpha = 1 }
}
function drawTimeline(now) {
  const [g, w, h] = canvas("timeline"), left = 70, soft = css("--soft"), rows = [[8, "scheduler"], [48, "worker"], [88, "batch"]];
  g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle";
  const durations = steps.map(s => s[4] - s[2]).sort((a, b) => a - b), middle = durations[durations.length >> 1] || .01;
  const span = Math.min(20, Math.max(.25, middle * 60)), end = steps.length ? Math.max(steps[steps.length - 1][4], now - span / 2) : now, scale = (w - left) / span;
  const at = t => w - (end - t) * scale;
  let tick = 10 ** Math.floor(Math.log10(span / 4)); if (span / tick > 20) tick *= 5; else if (span / tick > 8) tick *= 2;
  g.strokeStyle = css("--grid"); g.fillStyle = soft; g.lineWidth = 1; g.textAlign = "center";
  for (let t = 0; t < span; t += tick) { const x = Math.round(w - t * scale) - .5; if (x < left + 12) break; g.beginPath(); g.moveTo(x, 4); g.lineTo(x, h - 20); g.stroke(); if (x < w - 20) g.fillText("−" + (tick < 1 ? Math.round(t * 1000) + " ms" : t + " s"), x, h - 8) }
  g.textAlign = "left"; for (const [y, name] of rows) g.fillText(name, 0, y + 14);
  const most = Math.max(1, ...steps.filter(s => at(s[4]) > left).map(s => s[6]));
  g.save(); g.beginPath(); g.rect(left, 0, w - left, h); g.clip();
  const colors = [css("--violet"), css("--blue"), css("--amber")];
  const lanes = [...new Set(steps.map(s => s[7] ?? 0))].sort((a, b) => a - b), high = 28 / Math.max(1, lanes.length);
  for (const [, planned, started, ended, done, decode, tokens, replica] of steps) {
    if (at(done) < left) continue;
    const lane = high * lanes.indexOf(replica ?? 0);
    const color = tokens > decode ? colors[2] : colors[1], width = Math.max(1, (ended - started) * scale - .6);
    g.fillStyle = colors[0]; g.globalAlpha = .75; g.fillRect(at(planned), rows[0][0] + 4 + lane * 20 / 28, Math.max(1, (started - planned) * scale - .6), high * 20 / 28);
    g.globalAlpha = 1; g.fillStyle = color; g.fillRect(at(started), rows[1][0] + lane, width, high);
    const size = Math.max(1.5, 38 * Math.sqrt(tokens / most)); g.fillRect(at(started), rows[2][0] + 40 - size, width, size);
  }
  g.restore();
  if (!steps.length) { g.fillStyle = soft; g.textAlign = "center"; g.fillText("no steps yet", (w + left) / 2, h / 2 - 12) }
}
function cell(row, text) { const c = row.insertCell(); c.textContent = text; return c }
function objective(slo) {
  if (!slo) return "";
  const [ttft, tpot, e2e, perPrompt] = slo, parts = [];
  if (ttft != null || perPrompt != null) parts.push("first " + seconds(ttft ?? 0) + (perPrompt ? "+" : ""));
  if (tpot != null) parts.push(seconds(tpot) + "/token"); if (e2e != null) parts.push("all " + seconds(e2e));
  return parts.join(", ");
}
function abortButton(name) {
  const button = document.createElement("button"); button.type = "button"; button.className = "abort"; button.textContent = "abort"; button.dataset.name = name;
  button.setAttribute("aria-label", "abort the request " + name);
  button.addEventListener("click", () => { button.disabled = true; fetch(root + "/abort_requests", { method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify({ request_ids: [name] }) }) });
  return button;
}
function list(requests) {
  const all = [...requests.waiting.filter(r => r.state !== "finished"), ...requests.running], body = $("requests"), focused = document.activeElement?.dataset?.name; body.textContent = "";
  $("none").hidden = all.length > 0; $("none").previousElementSibling.hidden = !all.length;
  for (const r of all) {
    const row = body.insertRow(), name = cell(row, ""), label = document.createElement("span"), tag = document.createElement("span"); label.className = "name"; label.textContent = label.title = r.name ?? r.id; name.append(label); tag.className = "tag " + r.state; tag.textContent = r.state; name.append(tag);
    if (r.is_latency_sensitive) { const t = document.createElement("span"); t.className = "tag ls"; t.textContent = "urgent"; name.append(t) }
    const bar = document.createElement("span"), fill = document.createElement("span"); bar.className = "bar"; fill.style.width = Math.min(100, 100 * r.num_output / r.max_tokens) + "%"; bar.append(fill);
    const tokens = cell(row, ""); const count = document.createElement("span"); count.className = "count"; count.textContent = r.num_output + " / " + r.max_tokens; tokens.append(bar, count);
    cell(row, r.num_prompt); cell(row, seconds(r.age_s)); cell(row, seconds(r.ttft_s)); cell(row, objective(r.slo)); const last_ = cell(row, ""); if (r.name) last_.append(abortButton(r.name));
  }
  if (focused) [...body.querySelectorAll("button")].find(one => one.dataset.name === focused)?.focus();
}
const drafts = s => s && s.num_draft_tokens ? `, ${Math.round(100 * s.num_accepted_tokens / s.num_draft_tokens)} % of drafts right` : "";
function show(tree) {
  const e = tree.engine, state = tree.is_draining ? "draining" : tree.state;
  $("what").dataset.model = tree.model; $("what").textContent = `${tree.model} · ${tree.version}` + (tree.num_api_processes > 1 ? ` · ${tree.num_api_processes} API processes` : "");
  $("state").textContent = state; $("state").className = state === "running" ? "running" : ["dead", "stopped"].includes(state) ? "bad" : "busy";
  if (!e) return;
  for (const s of e.steps) { steps.push(s); after[s[7] ?? 0] = s[0] }
  for (const [replica, count] of Object.entries(e.num_steps ?? { 0: e.counts.num_steps })) if (count < after[replica]) { delete after[replica]; if (!e.num_steps) { steps.length = 0; last = null } }
  steps.splice(0, steps.length - 1500);
  const c = e.counts, dt = last ? e.now - last.now : 0, rate = dt ? (c.num_output_tokens - last.counts.num_output_tokens) / dt : 0;
  const prefill = dt ? (c.num_prefill_tokens - last.counts.num_prefill_tokens) / dt : 0, recent = e.steps.map(s => s[3] - s[2]).sort((a, b) => a - b);
  const step = recent.length ? recent[recent.length >> 1] : null, promised = e.slo.num_promised, kept = e.slo.num_kept.tpot;
  const slo = promised ? kept / promised : null;
  history_.push({ running: c.num_running, rate, step, slo, kv: e.kv_usage }); if (history_.length > HOUR) history_.shift();
  put("running", c.num_running); put("waiting", c.num_waiting + " waiting, " + c.num_preemptions + " preempted so far");
  put("rate", big(rate), "tokens/s"); put("prefill", big(prefill) + " prompt tokens/s");
  put("step", step == null ? "–" : (step * 1000).toFixed(step < .1 ? 1 : 0), step == null ? "" : "ms"); put("steps", big(dt ? (c.num_steps - last.counts.num_steps) / dt : 0) + " steps/s, p99 " + (recent.length ? seconds(recent[Math.floor(.99 * recent.length)]) : "–"));
  put("slo", slo == null ? "–" : (100 * slo).toFixed(slo === 1 ? 0 : 1), slo == null ? "" : "%"); put("promised", promised ? `${kept} of ${promised} with an objective` : "no objectives yet");
  put("kv", (100 * e.kv_usage).toFixed(1), "%"); put("wasted", big(c.num_output_tokens) + " tokens made, " + c.num_wasted_tokens + " in vain" + drafts(e.speculation));
  curves(); drawTimeline(e.now); list(e.requests); last = e;
}
const WINDOW = 300, looks = [];
function buckets(text, name) { // the counts of a histogram of /metrics, by upper bound
  const found = new Map();
  for (const line of text.split("\n")) if (line.startsWith(name + "_bucket{")) {
    const bound = /le="([^"]+)"/.exec(line), value = +line.slice(line.lastIndexOf(" ") + 1);
    if (bound) { const le = bound[1] === "+Inf" ? Infinity : +bound[1]; found.set(le, (found.get(le) ?? 0) + value) }
  }
  return [...found].sort((a, b) => a[0] - b[0]);
}
function percentile(now, before, share) {
  const counts = now.map(([le, n], i) => [le, n - (before?.[i]?.[1] ?? 0)]), all = counts.length ? counts[counts.length - 1][1] : 0;
  if (!all) return null;
  let low = 0, below = 0;
  for (const [le, n] of counts) { if (n >= share * all) return le === Infinity ? low : low + (le - low) * (share * all - below) / (n - below || 1); low = le; below = n }
  return low;
}
async function percentiles() {
  if (document.hidden) return;
  let text; try { const response = await fetch(root + "/metrics", { headers: headers() }); if (!response.ok) return; text = await response.text() } catch { return }
  const seen = { at: Date.now() / 1000, ttft: buckets(text, "actorllm:time_to_first_token_seconds"), tpot: buckets(text, "actorllm:request_time_per_output_token_seconds") };
  looks.push(seen); while (looks.length > 1 && looks[0].at < seen.at - WINDOW) looks.shift();
  const before = seen.at - looks[0].at >= WINDOW - 10 ? looks[0] : null; // until then: since the server began
  for (const what of ["ttft", "tpot"]) {
    const [p50, p90, p99] = [.5, .9, .99].map(share => percentile(seen[what], before?.[what], share));
    put(what, p50 == null ? "–" : seconds(p50)); put(what + "-tail", p50 == null ? "no request yet" : `p90 ${seconds(p90)}, p99 ${seconds(p99)}`);
  }
}
$("range").addEventListener("change", () => { KEPT = +$("range").value; if (last) curves() });
function curves() { spark("c-running", "running", "--green"); spark("c-rate", "rate", "--blue"); spark("c-step", "step", "--violet"); spark("c-slo", "slo", "--green", 1); spark("c-kv", "kv", "--amber", 1) }
async function look() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const response = await fetch(`${root}/live?after=${Object.entries(after).map(([replica, step]) => replica + "." + step).join() || 0}`, { headers: headers() });
    if (response.status === 401) { if (!$("ask").open) $("ask").showModal(); return }
    const tree = await response.json();
    if (response.ok) show(tree); else throw new Error(tree.error.message);
  } catch (error) { $("state").textContent = error instanceof TypeError ? "the server does not answer" : error.message; $("state").className = "bad" }
  finally { asking = false; clearTimeout(timer); if (!document.hidden && !$("ask").open) timer = setTimeout(look, PERIOD) }
}
$("ask").addEventListener("close", () => { key = $("key").value; sessionStorage.setItem("actorllm-key", key); look() });
document.addEventListener("visibilitychange", look);
setInterval(percentiles, 5000);
