/** Making elements, without markup in strings. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. Properties: `class`, `on` (listeners by event), anything else is an attribute;
 * `true` writes it empty, `false`, `null` and `undefined` leave it out.
 */
export function h(tag, properties = {}, ...children) {
  return build(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function s(tag, properties = {}, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** A whole number with thin spaces between thousands. */
export function whole(number) {
  return Math.round(number).toLocaleString("en").replaceAll(",", "\u2009");
}

/** "1 step", "2 steps". */
export function count(number, noun, plural = `${noun}s`) {
  return `${whole(number)} ${number === 1 ? noun : plural}`;
}

/** A text on one line, cut to at most `most` characters. */
export function oneLine(text, most = 80) {
  const line = text.split(/\s+/).join(" ").trim() || "(empty)";
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}
