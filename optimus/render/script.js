// Draws stages over time on a canvas, from every kernel down; the page is complete without it.
(async () => {
  "use strict";
  const root = document.documentElement, by = id => document.getElementById(id);
  const source = by("data");
  if (!source) { root.dataset.script = "nothing to draw"; return; }
  const data = JSON.parse(source.textContent);

  // ------------------------------------------------------------ unpack
  async function inflate(packed) {
    const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  async function unpack(scene) {
    const raw = await inflate(scene.data), total = scene.counts.reduce((a, b) => a + b, 0);
    let at = 0;
    const column = Kind => {
      const found = new Kind(total);
      for (let i = 0; i < total; i++) {
        let value = 0, unit = 1, byte;
        do { byte = raw[at++]; value += (byte & 127) * unit; unit *= 128; } while (byte & 128);
        found[i] = value;
      }
      return found;
    };
    const begin = column(Float64Array), end = column(Float64Array);
    scene.name = column(Uint32Array); scene.microbatch = column(Uint32Array); scene.slack = column(Float64Array);
    scene.first = [0];
    let i = 0;
    for (const count of scene.counts) {
      for (let last = 0; i < scene.first.at(-1) + count; i++) {
        begin[i] += last; end[i] += begin[i]; last = end[i];
      }
      scene.first.push(i);
    }
    scene.begin = begin; scene.end = end; scene.data = null;
  }

  // ------------------------------------------------------------ places
  const lanes = data.lanes.length, longest = Math.max(...data.scenes.map(s => s.step)) / data.tick;
  const canvas = by("stage"), tip = by("tip"), pen = canvas.getContext("2d");
  const rows = Math.max(...data.scenes.map(s => s.rows.length));
  const TALL = rows > 16 ? 10 : rows > 10 ? 13 : 19, STRIP = rows > 10 ? 3 : 4, GAP = rows > 16 ? 3 : 4;
  const PITCH = TALL + (lanes - 1) * STRIP + GAP, HEAD = 26, AXIS = 26;
  let left = 72, width = 0, height = 0, ratio = 1, from = 0, to = longest, asked = false;
  const laneTop = lane => lane ? TALL + (lane - 1) * STRIP : 0;
  const laneTall = lane => lane ? STRIP - 1 : TALL;
  const x = time => left + (time - from) / (to - from) * (width - left);
  const timeAt = px => from + (px - left) / (width - left) * (to - from);

  function resize() {
    ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    const longName = Math.max(...data.scenes[0].rows.map(r => r.length));
    left = Math.min(150, 14 + 6.6 * longName);
    height = 0;
    for (const scene of data.scenes) { scene.top = height + HEAD; height = scene.top + scene.rows.length * PITCH + AXIS; }
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  // ------------------------------------------------------------ draw
  const dark = matchMedia("(prefers-color-scheme:dark)");
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();
  function search(array, low, high, value) { // the first whose value is above
    while (low < high) { const middle = (low + high) >> 1; if (array[middle] <= value) low = middle + 1; else high = middle; }
    return low;
  }
  function drawLane(scene, row, lane, colours) {
    const key = row * lanes + lane, stop = scene.first[key + 1];
    const top = scene.top + row * PITCH + laneTop(lane), tall = laneTall(lane);
    const shares = new Map();
    let column = -1; // a column of dots that several items share by their time, encoders at the bottom
    const flush = () => {
      let y = top + tall;
      for (const fill of shares.size > 1 ? [...shares.keys()].sort((a, b) => a - b) : shares.keys()) {
        const part = Math.min(1, shares.get(fill)) * tall;
        pen.fillStyle = colours[fill]; pen.fillRect(column / ratio, y - part, 1 / ratio, part); y -= part;
      }
      shares.clear();
    };
    const add = (place, fill, share) => {
      if (place !== column) { flush(); column = place; }
      shares.set(fill, (shares.get(fill) || 0) + share);
    };
    for (let i = search(scene.end, scene.first[key], stop, from); i < stop && scene.begin[i] < to; i++) {
      const fill = scene.fills[scene.name[i]];
      const a = Math.max(left, x(scene.begin[i])) * ratio, b = Math.min(width, x(scene.end[i])) * ratio;
      const first = Math.floor(a), last = Math.floor(b);
      if (first === last) { add(first, fill, b - a); continue; }
      add(first, fill, first + 1 - a);
      if (last > first + 1) {
        flush(); column = -1;
        const line = last - first > 6 && !lane ? 1 : 0; // between ops wide enough to be told apart
        pen.fillStyle = colours[fill]; pen.fillRect((first + 1) / ratio, top, (last - first - 1 - line) / ratio, tall);
        if (line) continue;
      }
      if (b > last) add(last, fill, b - last);
    }
    flush();
  }
  function seconds(ticks, digits) {
    const s = ticks * data.tick, size = Math.abs(s);
    if (size >= 1 || size === 0) return s.toFixed(digits ?? 3) + " s";
    if (size >= 1e-3) return (s * 1e3).toFixed(digits ?? 3) + " ms";
    return (s * 1e6).toFixed(digits ?? 1) + " µs";
  }
  function drawAxis(scene, ink, faint) {
    const y = scene.top + scene.rows.length * PITCH + 1, room = Math.max(2, Math.floor((width - left) / 110));
    const rough = (to - from) / room, power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    const unit = to * data.tick >= 1 || tick * data.tick >= 1e-2 ? [1, "s"] : [1e3, "ms"];
    const digits = Math.max(0, Math.ceil(-Math.log10(tick * data.tick * unit[0]) - 1e-9));
    pen.strokeStyle = faint; pen.fillStyle = ink; pen.textAlign = "center"; pen.font = "12px system-ui,sans-serif";
    pen.beginPath(); pen.moveTo(left, y + .5); pen.lineTo(width, y + .5); pen.stroke();
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const at = x(t), words = (t * data.tick * unit[0]).toFixed(digits) + " " + unit[1];
      pen.fillRect(at, y, 1, 4);
      const half = pen.measureText(words).width / 2;
      pen.fillText(words, Math.min(width - half, Math.max(left + half, at)), y + 16);
    }
    const end = scene.step / data.tick;
    if (end >= from && end <= to) { pen.fillRect(Math.min(width - 2, x(end)), scene.top - 3, 2, scene.rows.length * PITCH + 6); }
  }
  function draw() {
    asked = false;
    const colours = dark.matches ? data.dark : data.light, ink = css("--ink"), faint = css("--faint");
    pen.clearRect(0, 0, width, height);
    for (const scene of data.scenes) {
      pen.textAlign = "left"; pen.fillStyle = ink; pen.font = "600 13px system-ui,sans-serif";
      pen.fillText(scene.label + ": " + scene.step.toFixed(3) + " s", 0, scene.top - 9);
      pen.font = "12px system-ui,sans-serif";
      for (let row = 0; row < scene.rows.length; row++) {
        pen.textAlign = "right"; pen.fillStyle = ink;
        pen.fillText(scene.rows[row], left - 8, scene.top + row * PITCH + TALL / 2 + 4);
        for (let lane = 0; lane < lanes; lane++) drawLane(scene, row, lane, colours);
      }
      drawAxis(scene, ink, faint);
    }
    by("span").textContent = "showing " + seconds(to - from) + " from " + seconds(from);
  }
  const redraw = () => { if (!asked) { asked = true; requestAnimationFrame(draw); } };

  // ------------------------------------------------------------ move
  function show(a, b) {
    const span = Math.min(longest, Math.max(200, b - a));
    from = Math.min(Math.max(0, a), longest - span); to = from + span;
    tip.hidden = true; redraw();
  }
  const zoom = (factor, middle = (from + to) / 2) => show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  const place = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const deeds = {
    in: () => zoom(.5), out: () => zoom(2), all: () => show(0, longest),
    slot: () => show(data.slot[0] / data.tick, data.slot[1] / data.tick),
  };
  document.querySelectorAll("[data-do]").forEach(b => b.addEventListener("click", () => deeds[b.dataset.do]()));
  canvas.addEventListener("wheel", event => {
    if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return; // else the page scrolls
    event.preventDefault();
    const [px] = place(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) show(from + event.deltaX * (to - from) / width, to + event.deltaX * (to - from) / width);
    else zoom(Math.exp(event.deltaY * .002), timeAt(Math.max(left, px)));
  }, {passive: false});
  let held = null;
  canvas.addEventListener("pointerdown", event => {
    canvas.focus({preventScroll: true}); held = [place(event)[0], from, to]; canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointercancel", () => { held = null; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", event => zoom(.25, timeAt(place(event)[0])));
  canvas.addEventListener("pointermove", event => {
    const [px, py] = place(event);
    if (held && Math.abs(px - held[0]) > 3) {
      const moved = (held[0] - px) / (width - left) * (held[2] - held[1]);
      show(held[1] + moved, held[2] + moved);
    } else if (!held) hover(px, py);
  });
  canvas.addEventListener("keydown", event => {
    const step = (to - from) / 8;
    const act = {"+": deeds.in, "=": deeds.in, "-": deeds.out, "0": deeds.all, Home: deeds.all,
      ArrowLeft: () => show(from - step, to - step), ArrowRight: () => show(from + step, to + step)}[event.key];
    if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
  });

  // ------------------------------------------------------------ ask
  function itemAt(px, py) {
    const scene = data.scenes.find(s => py >= s.top && py < s.top + s.rows.length * PITCH);
    if (!scene || px < left) return null;
    const row = Math.floor((py - scene.top) / PITCH), inside = py - scene.top - row * PITCH;
    let lane = 0;
    while (lane + 1 < lanes && inside >= laneTop(lane + 1)) lane++;
    const key = row * lanes + lane, time = timeAt(px);
    const i = search(scene.end, scene.first[key], scene.first[key + 1], time);
    return i < scene.first[key + 1] && scene.begin[i] <= time ? {scene, row, lane, i} : null;
  }
  function describe({scene, row, lane, i}) {
    const idle = scene.names[scene.name[i]].startsWith("idle"), microbatch = scene.microbatch[i];
    return [scene.names[scene.name[i]],
      scene.rows[row] + ", " + data.lanes[lane] + " lane" + (microbatch ? ", microbatch " + (microbatch - 1) : ""),
      "starts " + (scene.begin[i] * data.tick).toFixed(6) + " s, takes " + seconds(scene.end[i] - scene.begin[i]),
      ...(idle ? [] : ["slack " + seconds(scene.slack[i] * data.slackTick / data.tick)])];
  }
  function hover(px, py) {
    const found = itemAt(px, py);
    tip.hidden = !found;
    if (!found) return;
    tip.replaceChildren(...describe(found).map(words => Object.assign(document.createElement("div"), {textContent: words})));
    const home = canvas.offsetTop, room = canvas.offsetLeft + width - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, px + 14)) + "px";
    tip.style.top = home + py + (py + tip.offsetHeight + 30 > height ? -tip.offsetHeight - 12 : 16) + "px";
  }

  // ------------------------------------------------------------ begin
  try {
    for (const scene of data.scenes) await unpack(scene);
    by("live").hidden = false; root.classList.add("js");
    resize(); draw();
    new ResizeObserver(() => { if (canvas.clientWidth && canvas.clientWidth !== width) { resize(); draw(); } }).observe(canvas);
    dark.addEventListener("change", redraw);
    if (location.hash === "#slot" && data.slot) { deeds.slot(); draw(); }
    root.dataset.script = "drawn";
    root.dataset.items = data.scenes.map(s => s.begin.length).join(" ");
    window.optimusReport = {itemAt, describe, show, data, x, tick: data.tick};
  } catch (error) { // the picture for paper stays
    by("live").hidden = true; root.classList.remove("js"); root.dataset.script = "failed: " + error.message;
  }
})();
