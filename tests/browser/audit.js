"use strict";
// What a person can reach by keyboard and can read, of the page that this is run in.

// Every element that Tab should stop at, in the order of the document; a group of radio buttons is one stop.
window.findStops = () => {
  const reachable = "a[href], button, input, textarea, summary, [tabindex='0']";
  window.stops = [...document.querySelectorAll(reachable)].filter(
    (each) => each.checkVisibility() && !each.disabled && (each.type !== "radio" || each.checked),
  );
  return window.stops.length;
};

// Where the focus is: the place in that list, also of what was brought anew, whether it can be seen, and what it is.
window.findStand = () => {
  const at = document.activeElement;
  const marks = [at, at.nextElementSibling, at.closest(".CodeMirror")];
  const isShown = marks.some((each) => each && getComputedStyle(each).outlineStyle !== "none");
  return [window.stops.findIndex((each) => each === at || (at.id && each.id === at.id)), isShown, at.outerHTML.slice(0, 120)];
};

// Texts whose contrast with what is behind them is below 4.5, or below 3 where they are large.
window.findFaint = () => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const mix = (colour, under) => {
    for (const paint of [`rgb(${under})`, colour]) {
      pen.fillStyle = paint;
      pen.fillRect(0, 0, 1, 1);
    }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const page = matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0] : [255, 255, 255];
  const findGround = (each) => (each ? mix(getComputedStyle(each).backgroundColor, findGround(each.parentElement)) : page);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const found = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data).join("");
    if (!own.trim() || !each.getClientRects().length || each.matches("title, script, style")) continue;
    const style = getComputedStyle(each);
    const ground = findGround(each);
    const [dim, bright] = [light(mix(each.closest("svg") ? style.fill : style.color, ground)), light(ground)].sort((a, b) => a - b);
    const ratio = (bright + 0.05) / (dim + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${each.tagName} ${each.className}: ${own.trim().slice(0, 40)}`);
  }
  return found;
};
