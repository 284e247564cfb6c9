const $ = id => document.getElementById(id);
const count = x => Math.round(x).toLocaleString("en-US");
const many = (x, word) => `${count(x)} ${word}${x === 1 ? "" : "s"}`;
function element(tag, cls, text) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
}

// ---- tooltip
const tip = $("tip");
function showTip(event, lines, code) {
  tip.replaceChildren(...lines.map(line => element("div", "", line)));
  if (code) tip.append(element("code", "", code));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}
const hideTip = () => { tip.style.display = "none"; };

// ---- icicle: [parent, start, length, prompts, rows, ending, rest, text]; a server adds [..., running sequences, owner]
let nodes = [];
function lookAt(list) {
  nodes = list.map(([parent, start, length, prompts, rows, ending, rest, text, running, owner], id) =>
    ({ id, parent, start, length, prompts, rows, ending, rest: rest || null, text: text || "", running: running || 0,
       owner: owner || "", kids: [], x: 0, deepest: start + length }));
  for (const node of nodes) if (node.parent >= 0) nodes[node.parent].kids.push(node);
  for (const node of nodes) {                       // parents come first
    let x = node.x + node.ending;
    for (const kid of node.kids) { kid.x = x; x += kid.prompts; }
    node.restX = x;
  }
  for (let i = nodes.length - 1; i > 0; i--) {
    const node = nodes[i], up = nodes[node.parent];
    if (node.rest) node.deepest = Math.max(node.deepest, node.rest[3]);
    up.deepest = Math.max(up.deepest, node.deepest);
  }
}
let shown = null;                                   // the node that fills the picture
// The depth that nearly all drawn prompts fit into, so that one long prompt does not flatten the picture.
function depthShown(root) {
  const ends = [];
  let total = 0;
  const push = (depth, weight) => { if (weight > 0) { ends.push([depth, weight]); total += weight; } };
  (function visit(stack) {
    while (stack.length) {
      const node = stack.pop();
      push(node.start + node.length, node.kids.length || node.rest ? node.ending : node.prompts);
      if (node.rest) push(node.rest[3], node.rest[1]);
      stack.push(...node.kids);
    }
  })([root]);
  ends.sort((a, b) => a[0] - b[0]);
  let seen = 0, depth = root.start + 1;
  for (const [d, weight] of ends) { depth = Math.max(depth, d); seen += weight; if (seen >= .97 * total) break; }
  const all = ends.length ? ends[ends.length - 1][0] : depth;
  return all <= 1.5 * depth ? all : 1.15 * depth;
}
function niceStep(span, ticks) {
  const raw = span / ticks, power = 10 ** Math.floor(Math.log10(raw));
  return Math.max(1, [1, 2, 5, 10].find(m => m * power >= raw) * power);
}
// There are thousands of blocks, so they are painted on a canvas. Only their labels are elements.
let blocks = [];                                    // drawn blocks: { x, y, w, h, node or rest }
function draw(root) {
  shown = root;
  const box = $("icicle"), width = box.clientWidth, height = box.clientHeight, scale = devicePixelRatio || 1;
  const top = root.parent < 0 ? 0 : root.start, bottom = Math.max(top + 1, depthShown(root));
  const sx = width / root.prompts, sy = height / (bottom - top), most = Math.log(Math.max(2, nodes[0].prompts));
  const css = getComputedStyle(document.documentElement), colour = name => css.getPropertyValue(name).trim();
  const hue = colour("--hue"), leaf = `rgb(${colour("--leaf")})`, path = colour("--path");
  const canvas = box.querySelector("canvas") || element("canvas"), hover = element("div", "hover");
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.cssText = `width:${width}px;height:${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const parts = [canvas, hover], stack = [root];
  blocks = [];
  while (stack.length) {
    const node = stack.pop();
    if (node.start > bottom) continue;
    const wide = node.prompts * sx;
    if (node.length) {
      const x = (node.x - root.x) * sx, y = (node.start - top) * sy, w = Math.max(wide, .6), h = Math.max(node.length * sy, 1);
      const share = Math.log(node.prompts) / most;
      blocks.push({ x, y, w, h, node });
      pen.fillStyle = node.prompts > 1 ? `rgba(${hue}, ${(.22 + .74 * share).toFixed(3)})` : leaf;
      pen.fillRect(x, y, w < 3 ? w : w - 1, h < 3 ? h : h - 1);
      if (node.running) {
        pen.fillStyle = path;
        pen.fillRect(x, y + Math.max(0, h - 4), w < 3 ? w : w - 1, Math.min(h, 3));
      }
      if (wide > 46 && h > 12) {
        const label = element("div", "label", node.text.trim() || count(node.length) + " tokens");
        label.style.cssText = `left:${x}px;top:${y}px;width:${w - 1}px;height:${h - 1}px;padding:${h > 17 ? "1px 4px" : "0 4px"};`
          + (h < 28 ? "white-space:nowrap;text-overflow:ellipsis;" : "") + (share > .55 ? "color:var(--on);" : "");
        parts.push(label);
      }
    }
    if (node.rest) {
      const [branches, prompts, rows, depth] = node.rest, from = node.start + node.length;
      const x = (node.restX - root.x) * sx, y = (from - top) * sy, w = Math.max(prompts * sx, .6), h = Math.max((depth - from) * sy, 3);
      blocks.push({ x, y, w, h, rest: [`${count(branches)} branches too narrow to draw`,
        `${count(prompts)} prompts, ${count(rows)} rows; they end at token ${count(depth)} on average`] });
      pen.fillStyle = `rgba(${hue}, .13)`;
      pen.fillRect(x, y, w, h);
      if (w >= 7) {                                 // hatched
        pen.save();
        pen.beginPath();
        pen.rect(x, y, w, h);
        pen.clip();
        pen.beginPath();
        for (let at = x - h; at < x + w; at += 8) { pen.moveTo(at, y + h); pen.lineTo(at + h, y); }
        pen.lineWidth = 2.5;
        pen.strokeStyle = `rgba(${hue}, .22)`;
        pen.stroke();
        pen.restore();
      }
      if (w > 100) {
        const label = element("div", "label", count(branches) + " branches");
        label.style.cssText = `left:${x}px;top:${y}px;width:${w}px;height:${h}px;padding:2px 4px;white-space:nowrap`;
        parts.push(label);
      }
    }
    for (let i = node.kids.length - 1; i >= 0; i--) stack.push(node.kids[i]);
  }
  box.replaceChildren(...parts);
  const step = niceStep(bottom - top, 8), marks = [];
  for (let d = Math.ceil(top / step) * step; d <= bottom; d += step) {
    const mark = element("span", "", count(d));
    mark.style.top = Math.min(Math.max((d - top) * sy, 7), height - 7) + "px";
    marks.push(mark);
  }
  $("depths").replaceChildren(...marks);
  $("clipped").textContent = root.deepest > bottom * 1.01 ? `The longest prompt here has ${count(root.deepest)} tokens; the picture ends at ${count(bottom)}.` : "";
  crumbs(root);
}
function listen() {
  const box = $("icicle"), place = event => {
    const edge = box.getBoundingClientRect(), x = event.clientX - edge.left, y = event.clientY - edge.top;
    return blocks.findLast(one => x >= one.x && x < one.x + Math.max(one.w, 1) && y >= one.y && y < one.y + one.h);
  };
  const leave = () => { hideTip(); const hover = box.querySelector(".hover"); if (hover) hover.style.display = "none"; };
  box.addEventListener("mousemove", event => {
    const found = place(event);
    if (!found) return leave();
    if (found.node) showTip(event, describe(found.node), found.node.text); else showTip(event, found.rest);
    box.querySelector(".hover").style.cssText = `left:${found.x}px;top:${found.y}px;width:${found.w}px;height:${found.h}px;display:block`;
  });
  box.addEventListener("mouseleave", leave);
  box.addEventListener("click", event => {
    const node = (place(event) || {}).node;
    leave();
    if (node) draw(node === shown && node.parent >= 0 ? nodes[node.parent] : node);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown) draw(shown); });
}
function describe(node) {
  const lines = [`${many(node.length, "token")} from token ${count(node.start)} on, in ${many(node.prompts, "prompt")}`];
  if (node.prompts > 1) lines.push(`computed once: ${count(node.length * (node.prompts - 1))} tokens saved; ${count(node.rows)} rows from here down`);
  if (node.owner) lines.push(`of ${node.owner}`);
  if (node.running) lines.push(`${many(node.running, "sequence")} running below`);
  if (node.ending && (node.kids.length || node.rest)) lines.push(`${count(node.ending)} of the prompts end here`);
  return lines;
}
function crumbs(root) {
  const way = [];
  for (let node = root; ; node = nodes[node.parent]) { way.unshift(node); if (node.parent < 0) break; }
  const parts = [];
  for (const node of way) {
    const name = node.parent < 0 ? `all ${count(node.prompts)} prompts` : (node.text || `${count(node.length)} tokens`).trim().slice(0, 28) + ` (${count(node.prompts)})`;
    if (node === root) parts.push(element("span", "soft", name));
    else { const b = element("button", "", name); b.onclick = () => draw(node); parts.push(b, element("span", "soft", " › ")); }
  }
  $("crumbs").replaceChildren(...(way.length > 1 ? parts : []));
}

// ---- steps: for each bin [start, seconds, steps, rows, path rows, running sequences]
function svg(tag, attributes, text) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) e.setAttribute(name, attributes[name]);
  if (text !== undefined) e.textContent = text;
  return e;
}
function drawSteps(bins) {
  const width = $("steps").clientWidth, left = 62, high = 96, gap = 30;
  const from = bins[0][0], span = Math.max(1e-6, bins[bins.length - 1][0] + bins[bins.length - 1][1] - from);
  const x = s => left + (s - from) / span * (width - left - 8);
  const running = bins.some(bin => bin[5]);
  const charts = [
    ["rows of a step", bin => bin[3] / bin[2], "var(--done)"],
    [running ? "rows of K/V from before" : "path rows carried in", bin => bin[4] / bin[2], "var(--path)"],
    ["seconds of a step", bin => bin[1] / bin[2], "var(--done)"],
  ];
  if (running) charts.splice(0, 0, ["sequences running", bin => bin[5] / bin[2], "var(--done)"]);
  const image = svg("svg", { width, height: charts.length * (high + gap) + 18 });
  charts.forEach(([name, value, colour], i) => {
    const y0 = i * (high + gap) + 18, most = Math.max(...bins.map(value)) || 1;
    image.append(svg("text", { x: left, y: y0 - 5 }, name));
    for (const share of [0, .5, 1]) {
      const y = y0 + high * (1 - share);
      const label = most < 10 ? (most * share).toPrecision(2) : count(most * share);
      image.append(svg("line", { x1: left, x2: width - 8, y1: y, y2: y, stroke: "var(--line)" }));
      image.append(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, share ? label : "0"));
    }
    for (const bin of bins) {
      const h = high * value(bin) / most, w = x(bin[0] + bin[1]) - x(bin[0]);
      image.append(svg("rect", { x: x(bin[0]), y: y0 + high - h, width: Math.max(w - (w > 4 ? 1 : 0), .8), height: h, fill: colour }));
    }
  });
  const yEnd = charts.length * (high + gap);
  const step = span < 2 ? span / 4 : niceStep(span, 8);
  for (let s = 0; s <= span * 1.0001; s += step)
    image.append(svg("text", { x: x(from + s), y: yEnd + 4, "text-anchor": "middle" }, (span < 2 ? s.toFixed(2) : count(s)) + " s"));
  image.addEventListener("mousemove", event => {
    const s = from + (event.offsetX - left) / (width - left - 8) * span;
    const bin = bins.find(b => s < b[0] + b[1]) || bins[bins.length - 1], many = bin[2] > 1;
    showTip(event, [`${many ? count(bin[2]) + " steps" : "a step"} at ${(bin[0] - from).toFixed(2)} s`,
      `${count(bin[3] / bin[2])} rows, ${count(bin[4] / bin[2])} ${running ? "rows of K/V" : "path rows"}, ${(bin[1] / bin[2]).toPrecision(3)} s${many ? " each, on average" : ""}`,
      `${count(bin[3] / Math.max(bin[1], 1e-9))} rows a second`,
      ...(running ? [`${count(bin[5] / bin[2])} sequences running`] : [])]);
  });
  image.addEventListener("mouseleave", hideTip);
  $("steps").replaceChildren(image);
}
