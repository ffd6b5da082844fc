// A back-off n-gram language model on the GPU, asked by single threads.
// Shape letters: E n-grams of all orders, S states (histories that n-grams go on from), V labels.
#pragma once

namespace ds2 {

// An n-gram model as an automaton: entry e leads from state keys[e] / vocabulary by the word keys[e] % vocabulary.
struct Grams {
    const long long* keys;  // (E) ascending; the first `vocabulary` are the unigrams
    const float* log_prob;  // (E)
    const int* next_state;  // (E)
    const float* backoff;   // (S)
    const int* suffix;      // (S) the next shorter history; state 0 is the empty one
    const int* first;       // (S + 1) first entry of each state
    const int* label_ids;   // (V) vocabulary ids of the labels, for a model of labels
    int vocabulary, order, unknown;
};

// The entry of (state, word), or -1.
__device__ inline int find_entry(const Grams& grams, int state, int word) {
    if (state == 0) return word;
    const long long key = (long long)(state)*grams.vocabulary + word;
    int low = __ldg(grams.first + state), high = __ldg(grams.first + state + 1);
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (__ldg(grams.keys + middle) < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < __ldg(grams.first + state + 1) && __ldg(grams.keys + low) == key ? low : -1;
}

// log p(word | state) and the state after it.
__device__ inline float read_word(const Grams& grams, int state, int word, int& after) {
    float penalty = 0.0f;
    int entry;
    while ((entry = find_entry(grams, state, word)) < 0) {
        penalty += __ldg(grams.backoff + state);
        state = __ldg(grams.suffix + state);
    }
    after = __ldg(grams.next_state + entry);
    return __ldg(grams.log_prob + entry) + penalty;
}

}  // namespace ds2
