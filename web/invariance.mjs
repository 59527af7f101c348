// W₀: the smallest number of rows from which a row's logits do not depend on how many there are, measured here.
// The promise that drafting leaves the text untouched, bit for bit, rests on it.

import { prefill } from "./decoder.mjs";

export const LONGEST_DRAFT = 8;
const ROWS = LONGEST_DRAFT + 1;
const WIDEST = 4;
const PAST = 37;

/** W₀ of a target, null if rows vary up to a width of 4. */
export async function leastRows(decoder) {
  const ids = Array.from({ length: PAST + ROWS }, (_, i) => (i * 7919 + 13) % decoder.vocabulary);
  decoder.rollback(0);
  await prefill(decoder, ids.slice(0, PAST), PAST, WIDEST);
  const rows = ids.slice(PAST);
  const whole = await decoder.run(rows);
  let found = null;
  for (let width = 1; width <= WIDEST && found === null; width++) {
    if ((await equal(decoder, rows, width, whole)) && (await equal(decoder, rows, width + 1, whole))) found = width;
  }
  decoder.rollback(0);
  return found;
}

async function equal(decoder, rows, width, whole) {
  decoder.rollback(PAST);
  for (let begin = 0; begin < ROWS; begin += width) {
    const part = rows.slice(begin, begin + width);
    const padded = [...part, ...new Array(width - part.length).fill(rows[0])];
    const logits = await decoder.run(padded);
    if (part.some((_, i) => logits[i].some((z, v) => z !== whole[begin + i][v]))) return false;
  }
  return true;
}
