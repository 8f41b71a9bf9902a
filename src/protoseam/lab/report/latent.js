// The latent space over the epochs, on a canvas: points, prototypes, ellipses, decisions of N2, and what lies under the pointer.
function latentView(latent, answers) {
  const canvas = $("latent-view"), pen = canvas.getContext("2d");
  const { epochs, points: N, directions: D, low, unit } = latent;
  const E = epochs.length;
  const decode = (text) => Float32Array.from(unpack(text, Uint16Array), (v) => low + unit * v);
  const z = decode(latent.z);
  const s = latent.s ? decode(latent.s) : null;
  const C = s ? s.length / (E * D) : 0;
  const half = (D * (D + 1)) / 2;
  const roots = latent.roots ? unpack(latent.roots, Int16Array) : null;
  const head = latent.head ? unpack(latent.head, Float32Array) : null;
  const item = answers.point;
  const label = item.map((i) => answers.label[i]);
  const wrong = item.map((i) => answers.first && answers.first[i] !== answers.label[i]);
  let time = E - 1, across = 0, up = 1, only = -1, onlyWrong = false, hovered = -1, playing = 0, size = 600;

  // ---------------------------------------------------------------- where things are
  /** Between two kept epochs things move in straight lines; a projection does not change. */
  function between(values, per, i, d) {
    const e = Math.floor(time), f = time - e;
    const here = values[(e * per + i) * D + d];
    return f ? here + f * (values[((e + 1) * per + i) * D + d] - here) : here;
  }
  let frame = null;
  function fit() {
    const ends = [across, up].map((d) => {
      const all = [];
      for (let e = 0; e < E; e++) {
        for (let i = 0; i < N; i++) all.push(z[(e * N + i) * D + d]);
        for (let c = 0; c < C; c++) all.push(s[(e * C + c) * D + d]);
      }
      all.sort((a, b) => a - b);
      const cut = Math.floor(0.002 * all.length);
      return [all[cut], all[all.length - 1 - cut]];
    });
    const reach = 0.54 * Math.max(...ends.map(([a, b]) => b - a)) || 1;
    const middle = ends.map(([a, b]) => (a + b) / 2);
    frame = { left: middle[0] - reach, bottom: middle[1] - reach, scale: 1 / (2 * reach) };
  }
  const px = (v) => (v - frame.left) * frame.scale * size;
  const py = (v) => (1 - (v - frame.bottom) * frame.scale) * size;

  // ---------------------------------------------------------------- drawing
  function regions() {
    const e = Math.round(time), G = C > 20 ? 160 : 280;
    const picture = document.createElement("canvas");
    picture.width = picture.height = G;
    const inner = picture.getContext("2d"), image = inner.createImageData(G, G);
    const shades = Array.from({ length: C }, (_, c) => colour(c).match(/[0-9a-f]{2}/g).map((h) => parseInt(h, 16)));
    for (let j = 0; j < G; j++) {
      const b = frame.bottom + (1 - (j + 0.5) / G) / frame.scale;
      for (let i = 0; i < G; i++) {
        const a = frame.left + (i + 0.5) / G / frame.scale;
        let best = -Infinity, chosen = 0;
        for (let c = 0; c < C; c++) {
          const at = (e * C + c) * 3, value = head[at] * a + head[at + 1] * b + head[at + 2];
          if (value > best) { best = value; chosen = c; }
        }
        image.data.set([...shades[chosen], theme() === "dark" ? 56 : 40], (j * G + i) * 4);
      }
    }
    inner.putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = true;
    pen.drawImage(picture, 0, 0, size, size);
  }
  function dot(x, y, c, r) {
    const shape = Math.floor(c / 10) % SHAPES;
    pen.beginPath();
    if (shape === 0) pen.arc(x, y, r, 0, 7);
    else if (shape === 1) pen.rect(x - r, y - r, 2 * r, 2 * r);
    else {
      const corners = shape === 2 ? [[0, -1.3], [1.2, 0.9], [-1.2, 0.9]] : [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]];
      corners.forEach(([a, b], i) => pen[i ? "lineTo" : "moveTo"](x + a * r, y + b * r));
      pen.closePath();
    }
    pen.fill();
  }
  function star(x, y, r) {
    pen.beginPath();
    for (let i = 0; i < 10; i++) {
      const angle = (Math.PI * i) / 5 - Math.PI / 2, reach = i % 2 ? 0.45 * r : r;
      pen.lineTo(x + reach * Math.cos(angle), y + reach * Math.sin(angle));
    }
    pen.closePath();
    pen.fill();
    pen.stroke();
  }
  /** Two deviations of Σ̃ in the plane: Σ̃ restricted to it is R Rᵀ of two rows of the root. */
  function ellipse(c, x, y) {
    const e = Math.round(time), at = (e * C + c) * half;
    const root = (a, b) => roots[at + (Math.max(a, b) * (Math.max(a, b) + 1)) / 2 + Math.min(a, b)] * latent.root_unit;
    let aa = 0, ab = 0, bb = 0;
    for (let d = 0; d < D; d++) {
      aa += root(across, d) ** 2; ab += root(across, d) * root(up, d); bb += root(up, d) ** 2;
    }
    const mean = (aa + bb) / 2, spread = Math.hypot((aa - bb) / 2, ab);
    const turn = 0.5 * Math.atan2(2 * ab, aa - bb), zoom = 2 * frame.scale * size;
    pen.beginPath();
    pen.ellipse(x, y, zoom * Math.sqrt(mean + spread), zoom * Math.sqrt(Math.max(0, mean - spread)), -turn, 0, 7);
    pen.stroke();
  }
  const hidden = (i) => (only >= 0 && label[i] !== only) || (onlyWrong && !wrong[i]);
  function draw() {
    const ratio = window.devicePixelRatio || 1;
    size = canvas.clientWidth || 600;
    canvas.width = canvas.height = Math.round(size * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = css("--paper");
    pen.fillRect(0, 0, size, size);
    if (head && C) regions();
    const shrink = Math.max(0.65, Math.min(1, size / 600)); // on a phone
    const r = shrink * Math.max(1.8, Math.min(3.6, 90 / Math.sqrt(N)));
    for (const faint of [true, false]) {
      for (let i = 0; i < N; i++) {
        if (hidden(i) !== faint) continue;
        pen.globalAlpha = faint ? 0.08 : 0.8;
        pen.fillStyle = colour(label[i]);
        dot(px(between(z, N, i, across)), py(between(z, N, i, up)), label[i], r);
      }
    }
    pen.globalAlpha = 1;
    for (let c = 0; c < C; c++) {
      if (only >= 0 && only !== c) continue;
      const x = px(between(s, C, c, across)), y = py(between(s, C, c, up));
      pen.lineWidth = 1.3;
      pen.strokeStyle = colour(c);
      if (roots && (C <= 20 || only >= 0)) ellipse(c, x, y);
      pen.fillStyle = colour(c);
      pen.strokeStyle = css("--ink");
      pen.lineWidth = 1;
      star(x, y, shrink * (C > 40 ? 6 : 9));
      if (C <= 20 || only >= 0) name(className(c), x + 9, y - 7);
    }
    if (!s && C === 0 && only < 0) names();
    if (hovered >= 0) {
      pen.lineWidth = 2;
      pen.strokeStyle = css("--ink");
      pen.beginPath();
      pen.arc(px(between(z, N, hovered, across)), py(between(z, N, hovered, up)), r + 4, 0, 7);
      pen.stroke();
    }
    const shown = epochs[Math.round(time)];
    $("epoch-shown").textContent = `epoch ${shown}`;
    $("epoch").setAttribute("aria-valuetext", `epoch ${shown}`);
    canvas.setAttribute("aria-label", `The latent space after epoch ${shown}: ${N} test images${C ? ` and ${C} prototypes` : ""}`);
  }
  function name(text, x, y) {
    pen.font = "600 13px system-ui, sans-serif";
    pen.lineWidth = 3.5;
    pen.strokeStyle = css("--paper");
    pen.strokeText(text.slice(0, 18), x, y);
    pen.fillStyle = css("--ink");
    pen.fillText(text.slice(0, 18), x, y);
  }
  /** Without prototypes a name stands at the mean of its class. */
  function names() {
    const sums = new Map();
    for (let i = 0; i < N; i++) {
      const own = sums.get(label[i]) || [0, 0, 0];
      own[0] += between(z, N, i, across); own[1] += between(z, N, i, up); own[2] += 1;
      sums.set(label[i], own);
    }
    if (sums.size <= 20) for (const [c, [a, b, n]] of sums) name(className(c), px(a / n), py(b / n));
  }

  // ---------------------------------------------------------------- what a person does
  function hover(i, event) {
    if (i === hovered && !event) return;
    hovered = i;
    const card = $("point");
    if (i < 0) { tip(""); draw(); return; }
    const k = item[i], told = [make("p", {}, make("strong", {}, className(label[i])), ` · test image ${answers.row[k]}`)];
    if (answers.first) {
      const answer = make("p", wrong[i] ? { class: "no" } : {}, `Answer: ${className(answers.first[k])}, ${percent(answers.p[k])}`);
      told.push(answer, make("p", {}, `Then: ${className(answers.second[k])}, ${percent(answers.q[k])}`));
    }
    card.replaceChildren(make("div", { class: "who" }, picture(k, 72), make("div", {}, ...told)));
    if (event) tip(`${className(label[i])}, image ${answers.row[k]}${answers.first ? `: answered ${className(answers.first[k])}` : ""}`, event);
    draw();
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = 14 ** 2, near = -1;
    for (let i = 0; i < N; i++) {
      if (hidden(i)) continue;
      const far = (px(between(z, N, i, across)) - x) ** 2 + (py(between(z, N, i, up)) - y) ** 2;
      if (far < best) { best = far; near = i; }
    }
    if (near >= 0 || hovered >= 0) hover(near, event);
  });
  canvas.addEventListener("pointerleave", () => hover(-1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    let i = hovered;
    for (let tried = 0; tried < N; tried++) {
      i = (i + step + N) % N;
      if (!hidden(i)) { hover(i); return; }
    }
  });
  const slider = $("epoch");
  slider.value = String(E - 1);
  slider.addEventListener("input", () => { stop(); time = Number(slider.value); draw(); });
  function stop() {
    cancelAnimationFrame(playing);
    playing = 0;
    $("play").textContent = "Play";
  }
  $("play").addEventListener("click", () => {
    if (playing) { time = Math.round(time); stop(); draw(); return; }
    if (time >= E - 1) time = 0;
    $("play").textContent = "Pause";
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let before = performance.now();
    const advance = (now) => {
      const passed = (now - before) / 1000;
      if (!still || passed > 0.8) {
        time = Math.min(E - 1, still ? Math.floor(time) + 1 : time + 3 * passed);
        before = now;
        slider.value = String(Math.round(time));
        draw();
      }
      if (time >= E - 1) stop();
      else playing = requestAnimationFrame(advance);
    };
    playing = requestAnimationFrame(advance);
  });
  if (E < 2) $("play").disabled = slider.disabled = true;

  const plane = $("plane");
  const share = (d) => (D > 2 ? ` (${Math.round(100 * latent.share[d])} %)` : "");
  for (let a = 0; a < D; a++) for (let b = a + 1; b < D; b++) {
    if (D > 2 && b > a + 1 && a > 1) continue; // neighbours, and all with the first two
    plane.append(make("option", { value: `${a} ${b}` }, D > 2 ? `${a + 1}${share(a)} and ${b + 1}${share(b)}` : "the seam itself"));
  }
  plane.addEventListener("change", () => { [across, up] = plane.value.split(" ").map(Number); fit(); draw(); });
  const present = [...new Set(label)].sort((a, b) => a - b);
  for (const c of present) $("only").append(make("option", { value: String(c) }, className(c)));
  $("only").addEventListener("change", () => { only = Number($("only").value); draw(); });
  if (answers.first) $("wrong").addEventListener("change", () => { onlyWrong = $("wrong").checked; draw(); });
  else $("wrong").parentNode.remove();
  const legend = $("legend");
  function keys() {
    legend.replaceChildren();
    if (present.length > 40) return;
    for (const c of present) {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = colour(c);
      legend.append(make("li", {}, swatch, className(c)));
    }
    if (present.length > 12) { legend.tabIndex = 0; legend.setAttribute("aria-label", "Colours of the classes"); }
  }
  fit();
  painters.push(() => { keys(); draw(); });
  window.addEventListener("resize", draw);
}
