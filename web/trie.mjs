// The merges of a vocabulary map as a trie over draft tokens.

/** What draft tokens spell so far. `target`: the target token they complete, -1 for none. */
class Node {
  children = new Map();
  target = -1;
}

/** The root of a trie of [spelling in draft tokens, target id]; of two with one spelling the first counts. */
export function mergeTrie(merges) {
  const root = new Node();
  for (const [spelling, target] of merges) {
    let node = root;
    for (const draft of spelling) {
      if (!node.children.has(draft)) node.children.set(draft, new Node());
      node = node.children.get(draft);
    }
    if (node.target < 0) node.target = target;
  }
  return root;
}
