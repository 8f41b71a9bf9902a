// What the other parts share: elements, numbers, colours, themes, and the note beside the pointer.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

/** An element with attributes and children; a text is only ever a text. */
function make(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "circle", "g"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const className = (c) => (data.classes && data.classes[c] !== undefined ? data.classes[c] : String(c));

/** Three or four significant digits, without an exponent where that is short. */
function show(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

const percent = (share) => `${(100 * share).toFixed(share > 0.9995 && share < 1 ? 2 : 1)} %`;

/** The values behind a base64 text, in the byte order they were written in. */
function unpack(text, Kind) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const read = Kind === Float32Array ? "getFloat32" : Kind === Int16Array ? "getInt16" : "getUint16";
  return Kind.from({ length: bytes.length / Kind.BYTES_PER_ELEMENT }, (_, i) => view[read](i * Kind.BYTES_PER_ELEMENT, true));
}

// Paul Tol's muted scheme for colour-vision deficiencies, and lighter forms of it for a dark page.
const PALETTES = {
  light: ["#332288", "#2a9fcb", "#44aa99", "#117733", "#8a8a1f", "#c9a227", "#cc6677", "#882255", "#aa4499", "#666666"],
  dark: ["#9b8cf0", "#88ccee", "#5fd0bc", "#55b56f", "#c9c95a", "#ecd98a", "#f0919f", "#e0699c", "#d98acb", "#bbbbbb"],
};
const theme = () => document.documentElement.dataset.theme;
const colour = (c) => PALETTES[theme()][c % 10];
const SHAPES = 4; // circle, square, triangle, diamond: another one for each ten classes
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const painters = []; // everything that must be drawn again in other colours
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", name === "dark" ? "Use light colours" : "Use dark colours");
  for (const paint of painters) paint();
}

function tip(text, event) {
  const note = $("tip");
  note.hidden = !text;
  if (!text) return;
  note.textContent = text;
  const right = event.clientX + 14 + note.offsetWidth > window.innerWidth;
  note.style.left = `${Math.max(4, right ? event.clientX - note.offsetWidth - 14 : event.clientX + 14)}px`;
  note.style.top = `${Math.max(4, event.clientY - note.offsetHeight - 10)}px`;
}

/** A test image from the sheet, or nothing where the data has no images. */
function picture(item, size) {
  const answers = data.answers;
  if (!answers || !answers.thumb || answers.thumb[item] < 0) return "";
  const i = answers.thumb[item];
  const node = make("span", { class: "thumb", role: "img", "aria-label": `Test image ${answers.row[item]}` });
  Object.assign(node.style, {
    width: `${size}px`,
    height: `${size}px`,
    backgroundSize: `${answers.columns * size}px ${answers.sheet_rows * size}px`,
    backgroundPosition: `${-(i % answers.columns) * size}px ${-Math.floor(i / answers.columns) * size}px`,
  });
  if (answers.tile >= 32) node.style.imageRendering = "auto";
  return node;
}
