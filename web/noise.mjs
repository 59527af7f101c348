// Counter-based noise: the same seed, position and token give the same number on any device.
// The formulas stand in runtime/noise.py; tests/golden/noise.json has values.

const ID = 0x9e3779b9;
const A = 0x7feb352d;
const B = 0x846ca68b;
const MASK = 0xffffffffn;

/** The integer hash, on one number taken modulo 2^32. */
export function mix(x) {
  x ^= x >>> 16;
  x = Math.imul(x, A);
  x ^= x >>> 15;
  x = Math.imul(x, B);
  return (x ^ (x >>> 16)) >>> 0;
}

/** The two 32-bit keys of a position. Seed and position: whole numbers below 2^64, BigInt from 2^53 on. */
export function keys(seed, position) {
  const words = [seed, position].map(BigInt).flatMap((n) => [Number(n & MASK), Number(n >> 32n)]);
  return [1, 2].map((i) => words.reduce((x, word) => mix(x + word), i));
}

/** The upper word of the hash of a token id: all that is needed to tell loud noise from quiet. */
export function upper(first, id) {
  return mix(mix(id + ID) ^ first);
}

/** Gumbel noise g of a token id at a position with these keys, a double. */
export function gumbel([first, second], id) {
  const h1 = upper(first, id);
  const h2 = mix(h1 + second);
  const u = (h1 * 2 ** 20 + (h2 >>> 12) + 0.5) * 2 ** -52;
  return -Math.log(-Math.log(u));
}
