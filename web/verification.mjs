// What the target says to a round's proposals, by the coupled draw.

import { draw } from "./sampling.mjs";

/**
 * Keep proposals while they are what the target draws; end with the first draw that is not, or the bonus.
 * `rows`: logits behind the last committed token and behind each proposal; `history`: all committed ids;
 * `position`: the absolute position of the first new token. Gives {tokens, accepted}.
 */
export function verify(rows, proposed, history, s, position) {
  const tokens = [];
  const penalised = s.repetition_penalty !== 1;
  for (let i = 0; ; i++) {
    const y = draw(rows[i], penalised ? [...history, ...tokens] : [], s, position + i);
    tokens.push(y);
    if (i === proposed.length || y !== proposed[i]) return { tokens, accepted: i };
  }
}
