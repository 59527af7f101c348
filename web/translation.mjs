// Which draft tokens may stand for which target tokens, in the form that drafting needs.

import { mergeTrie } from "./trie.mjs";

/**
 * A vocabulary map compiled for drafting.
 * `pieces`: draft id -> the target ids that spell it, [] for none; `root`: the trie of the merges.
 */
export class Translation {
  /** `map`: vocabulary.json; `draftSize`: rows of the draft model, which may be more than its tokenizer has tokens. */
  constructor(map, draftSize = 0) {
    this.pieces = map.pieces.slice();
    while (this.pieces.length < draftSize) this.pieces.push([]);
    this.root = mergeTrie(map.spelling.map((spelling, target) => [spelling, target]).filter(([s]) => s.length > 1));
  }

  /** How a draft token is translated: "none", "direct" or "split". */
  kind(draft) {
    return ["none", "direct"][this.pieces[draft].length] ?? "split";
  }
}
