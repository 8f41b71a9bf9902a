// Puts the parts together.
if (data.answers && data.answers.sheet) document.documentElement.style.setProperty("--sheet", `url(${data.answers.sheet})`);
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
for (const chart of data.curves || []) $("curve-grid")?.append(lineChart(chart));
for (const chart of data.compare || []) $("compare-grid").append(window.innerWidth < 520 ? lineChart(chart) : lineChart(chart, 520, 230));
if (data.latent) latentView(data.latent, data.answers);
if (data.answers && data.answers.confusion) {
  confusionView();
  gallery($("worst-images"), data.answers.worst);
  gallery($("doubtful-images"), data.answers.doubtful);
}
if (data.reliability) $("reliability-chart").append(reliabilityChart(data.reliability));
for (const heading of document.querySelectorAll("section > h2")) {
  $("contents").append(make("li", {}, make("a", { href: `#${heading.parentNode.id}` }, heading.dataset.short)));
}
const links = [...document.querySelectorAll("nav a")];
const watcher = new IntersectionObserver((seen) => {
  for (const entry of seen) if (entry.isIntersecting) for (const link of links) {
    if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}, { rootMargin: "-20% 0px -75% 0px" });
for (const part of document.querySelectorAll("main > section")) watcher.observe(part);
$("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
let before = null;
window.addEventListener("beforeprint", () => { before = theme(); setTheme("light"); });
window.addEventListener("afterprint", () => before && setTheme(before));
setTheme(theme());
