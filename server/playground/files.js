/** Saving to files and opening them. */

/** Offer a text to the browser as a download. */
export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The searches of a file: one document, or one a line. Throws a message for a person. */
export async function readSearches(file) {
  const text = await file.text();
  try {
    return [JSON.parse(text)];
  } catch {
    try {
      return text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
    } catch {
      throw new Error(`${file.name} is not JSON`);
    }
  }
}
