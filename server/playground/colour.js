/** Rewards as colours: from amber to green, lightness falling (in the dark: rising) all the way. */

const LIGHT = ["#e2a24c", "#d9bd72", "#9db98a", "#4f9a83", "#0b6658"];
const DARK = ["#8a5420", "#a98a45", "#8fae7c", "#63c3a4", "#4fe3c1"];

/** A CSS colour for a reward in [0, 1]; grey for none. */
export function rewardColour(reward, dark) {
  if (reward === null) return dark ? "#77857d" : "#a3aca6";
  const stops = dark ? DARK : LIGHT;
  const at = Math.min(Math.max(reward, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.floor(at), stops.length - 2);
  return mix(stops[below], stops[below + 1], at - below);
}

function mix(a, b, share) {
  const parts = [1, 3, 5].map((at) => {
    const from = parseInt(a.slice(at, at + 2), 16);
    const to = parseInt(b.slice(at, at + 2), 16);
    return Math.round(from + (to - from) * share);
  });
  return `rgb(${parts.join(", ")})`;
}
