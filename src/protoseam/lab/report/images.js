// The confusion matrix with the images behind a cell, and the galleries.
function caption(item) {
  const { label, first, p } = data.answers;
  const answer = make("small", first[item] === label[item] ? {} : { class: "no" }, `→ ${className(first[item])}, ${Math.round(100 * p[item])} %`);
  return [make("strong", {}, className(label[item])), answer];
}

function gallery(list, items) {
  list.replaceChildren(...items.map((i) => make("li", {}, picture(i, 64), ...caption(i))));
  if (!items.length) list.replaceChildren(make("li", {}, "none"));
}

function confusionView() {
  const { confusion, label, first } = data.answers;
  const C = data.classes.length;
  const counts = new Map(confusion.map(([i, j, n]) => [i * C + j, n]));
  const totals = new Array(C).fill(0);
  for (const [i, , n] of confusion) totals[i] += n;
  const home = $("confusion");
  let pressed = null;

  function open(i, j, button) {
    const count = counts.get(i * C + j) || 0;
    const items = label.map((_, k) => k).filter((k) => label[k] === i && first[k] === j);
    const right = i === j ? "answered right" : `answered ${className(j)}`;
    const list = make("ul", { class: "gallery" });
    gallery(list, items.slice(0, 24));
    const some = Math.min(24, items.length) < count ? `; ${Math.min(24, items.length)} of them are shown` : "";
    $("cell").replaceChildren(make("p", {}, make("strong", {}, `${className(i)}, ${right}`), `: ${count} of ${totals[i]} images${some}`), list);
    if (pressed) pressed.setAttribute("aria-pressed", "false");
    if (button) button.setAttribute("aria-pressed", "true");
    pressed = button;
  }
  const shade = (i, j, n) => {
    const strength = Math.min(1, n / Math.max(1, totals[i]));
    return i === j ? `rgba(${css("--tint")}, ${0.08 + 0.32 * strength})` : `rgba(${css("--alarm")}, ${0.16 + 0.6 * Math.sqrt(strength)})`;
  };

  if (C <= 20) {
    const cells = [];
    const rows = data.classes.map((name, i) => make("tr", {}, make("th", { scope: "row" }, name), ...data.classes.map((_, j) => {
      const n = counts.get(i * C + j) || 0;
      const told = `${className(i)} answered as ${className(j)}: ${n}`;
      const button = make("button", { type: "button", "aria-label": told, "aria-pressed": "false" }, n ? String(n) : "");
      if (!n) button.disabled = true;
      button.addEventListener("click", () => open(i, j, button));
      cells.push(() => { button.style.background = n ? shade(i, j, n) : ""; });
      return make("td", {}, button);
    })));
    const top = make("tr", {}, make("td"), ...data.classes.map((name) => make("th", { scope: "col" }, name)));
    home.append(make("table", { class: "matrix" }, make("caption", {}, "True class by row, answer by column"), make("thead", {}, top), make("tbody", {}, ...rows)));
    painters.push(() => cells.forEach((paint) => paint()));
  } else {
    const step = Math.max(Math.floor(800 / C), Math.min(2, 4000 / C)); // browsers paint no canvas far larger than that
    const canvas = make("canvas", { role: "img", "aria-label": `Confusion matrix of ${C} classes; the list beside it holds its largest mistakes` });
    canvas.width = canvas.height = Math.round(step * C);
    home.append(make("p", { class: "hint" }, "True class by row, answer by column, in the order of the classes. Point at a cell to read it."), canvas);
    const pen = canvas.getContext("2d");
    painters.push(() => {
      pen.clearRect(0, 0, canvas.width, canvas.height);
      for (const [i, j, n] of confusion) { pen.fillStyle = shade(i, j, n); pen.fillRect(j * step, i * step, Math.max(1, step), Math.max(1, step)); }
    });
    const cell = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientY - box.top, event.clientX - box.left].map((v) => Math.max(0, Math.min(C - 1, Math.floor((v / box.width) * C))));
    };
    canvas.addEventListener("pointermove", (event) => {
      const [i, j] = cell(event);
      tip(`${className(i)} answered as ${className(j)}: ${counts.get(i * C + j) || 0} of ${totals[i]}`, event);
    });
    canvas.addEventListener("pointerleave", () => tip(""));
    canvas.addEventListener("click", (event) => open(...cell(event), null));
  }
  const most = confusion.filter(([i, j]) => i !== j).sort((a, b) => b[2] - a[2]).slice(0, 12);
  for (const [i, j, n] of most) {
    const button = make("button", { type: "button", "aria-pressed": "false" }, `${className(i)} → ${className(j)} `, make("small", {}, `×${n}`));
    button.addEventListener("click", () => open(i, j, button));
    $("top-mistakes").append(make("li", {}, button));
  }
  if (!most.length) $("top-mistakes").append(make("li", {}, "none"));
  else open(most[0][0], most[0][1], null);
}
