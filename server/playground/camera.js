/** From columns and rows to pixels. Both axes have a scale of their own; sizes on screen do not. */

const PAD = { left: 26, top: 22, bottom: 22 };
const COLUMN = { least: 14, most: 340, indent: 56 };
const ROW = { least: 0.6, most: 34, fit: 26 };
const WORDS = 130; // a column that is narrower has no room for a step's words

export class Camera {
  constructor() {
    this.column = 150;
    this.row = 24;
    this.left = PAD.left;
    this.top = PAD.top;
    this.moved = false; // by a person: the tree is no longer fitted while it grows
  }

  x(depth) {
    return this.left + depth * this.column;
  }

  y(row) {
    return this.top + row * this.row;
  }

  /** A node's radius in pixels, from the room it has. */
  get radius() {
    return Math.min(Math.max(this.row * 0.4, 1.5), 7.5);
  }

  /** Show all of it, labels of the last column included. */
  fit(layout, width, height) {
    const columns = columnFor(layout.depth, width);
    this.column = layout.indented
      ? clamp((width * 0.4) / layout.depth, COLUMN.least, COLUMN.indent)
      : clamp(columns, COLUMN.least, COLUMN.most);
    this.row = clamp((height - PAD.top - PAD.bottom) / layout.height, ROW.least, ROW.fit);
    this.left = PAD.left;
    this.top = Math.max(PAD.top, (height - layout.height * this.row) / 2);
    this.moved = false;
  }

  pan(dx, dy) {
    this.left += dx;
    this.top += dy;
    this.moved = true;
  }

  /** Magnify around a point that stays where it is. */
  zoom(factor, x, y) {
    const column = clamp(this.column * factor, COLUMN.least, COLUMN.most * 1.6);
    const row = clamp(this.row * factor, ROW.least, ROW.most);
    this.left = x - ((x - this.left) * column) / this.column;
    this.top = y - ((y - this.top) * row) / this.row;
    this.column = column;
    this.row = row;
    this.moved = true;
  }

  /** Move no more than is needed for a point of the tree to be seen. */
  reveal(depth, row, width, height) {
    const margin = Math.min(40, height / 4);
    const x = this.x(depth);
    const y = this.y(row);
    const dx = x < margin ? margin - x : x > width - 3 * margin ? width - 3 * margin - x : 0;
    const dy = y < margin ? margin - y : y > height - margin ? height - margin - y : 0;
    if (dx || dy) this.pan(dx, dy);
  }
}

/** The height in which a tree stands whole, with room for words where `most` allows it. */
export function heightFor(layout, least, most) {
  return clamp(Math.ceil(layout.height * ROW.fit) + PAD.top + PAD.bottom, least, most);
}

/** Whether a tree of this depth has columns too narrow for words. */
export function narrow(depth, width) {
  return columnFor(depth, width) < WORDS;
}

function columnFor(depth, width) {
  return (width - PAD.left - Math.min(190, width * 0.3)) / depth;
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), most);
}
