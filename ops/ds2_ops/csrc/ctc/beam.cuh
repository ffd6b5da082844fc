// CTC prefix beam search of a batch in one launch: a block searches one utterance, all frames, its beam in shared memory.
//
// A prefix is a label sequence; its probability is kept in two halves, alignments that end in a blank and those that end
// in its last label, which are ranked and pruned apart (Hannun et al. 2014, "First-pass large vocabulary continuous
// speech recognition using bi-directional recurrent DNNs", algorithm 1). Labels at -inf are not followed.
//
// A frame: find prefixes whose parents are in the beam; score both halves of every prefix and every new label of each;
// cut at the beam-th best score; make the next prefixes. Nothing depends on the order in which threads run: what they
// choose is numbered by its place among the candidates, so runs give the same bits.
// Shape letters: T frames, B utterances, V labels (0 is the blank), K beam, N trie nodes, A characters, L most of a label.
#pragma once

#include "ctc/ngram.cuh"
#include "ctc/select.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

enum class Unit { NONE, WORD, LABEL };  // what the language model reads

// How labels spell words, and a trie of known and hot words: node 0 is off the trie, node 1 the empty prefix of utterances
// that have no root of their own.
struct Lexicon {
    const unsigned char* starts_word;  // (V) the label ends the word before it
    const long long* characters;       // (V, L) codes, 0 pads
    const long long* counts;           // (V) characters
    const int* children;               // (N, A)
    const long long* word;             // (N) vocabulary id or -1
    const unsigned char* is_word;      // (N)
    const double* hot;                 // (N) bonus of the hot words that end here
    const double* unfinished;          // (N) what a word is worth before it is whole
    const int* sounds;                 // (V) labels of one sound need a blank between them; null: all sounds differ
    const int* follow;                 // (N) where the word after one that ends here starts; 0: at the utterance's root
    int longest, width, space;         // L, A, the label that only separates words or -1
    int has_hot;                       // any hot words
};

struct Search {
    const float* log_probs;  // (T, B, V)
    const long long* frames; // (B) frames of each utterance
    const int* places;       // (B) rows of the tables below, whose prefixes go on; null: utterances start, row by row
    const int* roots;        // (rows) of the trie, or null: ROOT
    int2* grown;             // (B, T, K): entry and label that a prefix was made from; entry t K + slot + 1; the root is 0, slot s of before -1 - s
    double* halves;          // (2, rows, K): ends in a blank, ends in its last label
    long long* names;        // (rows, K, 4): hash, parent's hash, last label, entry
    long long* integers;     // (rows, K, 4): state, node, characters of the unfinished word, words
    double* floats;          // (rows, K, 2): language model, hot words
    double* table;           // (B, K, max(V + 2, order)) scores of the candidates, or null: in shared memory
    int length, batch, rows, labels, beam;
    int start_state, closed;  // closed: only words of the lexicon
    double alpha, beta, unknown_score, prune;
};

constexpr int BLANK = 0, OFF = 0, ROOT = 1;
constexpr long long DEAD_HASH = 0x1D5A, DEAD_PARENT = 0x2E6B, ROOT_PARENT = 0x3F7C;
constexpr double TYPICAL_WORD_CHARACTERS = 6, LN_10 = 2.302585092994046;

__device__ inline double log_add(double a, double b) {
    const double high = a > b ? a : b, low = a > b ? b : a;
    return low == none() ? high : high + log1p(exp(low - high));
}

template <int SLOTS_>
struct BeamShape {
    static constexpr int SLOTS = SLOTS_;
    static constexpr int THREADS = SLOTS <= 64 ? 256 : 512;
    static constexpr int WARPS = THREADS / 32;
    static_assert(THREADS % SLOTS == 0, "a thread makes one prefix");
};

template <int SLOTS>
struct Prefixes {
    double in_blank[SLOTS], in_label[SLOTS];
    long long hash[SLOTS], parent[SLOTS];
    double lm[SLOTS], hot[SLOTS];  // language model's log-prob, hot words' bonus
    double both[SLOTS];            // log-prob of either half
    double base[SLOTS];            // what the whole words are worth
    double stay[SLOTS];            // with the unfinished one
    double gain[SLOTS];            // what the unfinished one adds once it is whole
    double word_score[SLOTS];      // its log-prob; with a model of labels, that of a space not read yet
    int word_state[SLOTS];         // the model's state after it
    int asked[SLOTS];              // the last three are known
    int last[SLOTS], entry[SLOTS], state[SLOTS], node[SLOTS], length[SLOTS], words[SLOTS];
};

template <class Shape>
struct BeamMemory {
    Prefixes<Shape::SLOTS> prefixes[2];
    double stay_blank[Shape::SLOTS], stay_label[Shape::SLOTS];
    SelectionMemory<Shape::WARPS> selection;
    int parent_slot[Shape::SLOTS], chosen[Shape::SLOTS];
    int followed_count[2], followed_starts[2];
    unsigned char kept[2 * Shape::SLOTS];
};

template <class Shape, Unit UNIT>
struct BeamSearch {
    static constexpr int SLOTS = Shape::SLOTS, THREADS = Shape::THREADS, WARPS = Shape::WARPS;
    using Slots = Prefixes<SLOTS>;

    const Search& search;
    const Lexicon& lexicon;
    const Grams& grams;
    BeamMemory<Shape>& memory;
    Selection<WARPS> selection;
    double* table;             // scores: K in a blank, K in the last label, then K x followed labels
    float* rows;               // (2, V) log-probs of this frame and the next
    unsigned short* followed;  // (2, V) their labels above -inf, without the blank
    unsigned* children;        // (K, V / 32) labels by which a prefix grows into one that is in the beam already
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, utterance = blockIdx.x;
    const int labels = search.labels, beam = search.beam, mask_words = (search.labels + 31) / 32;
    const int row = search.places == nullptr ? utterance : search.places[utterance];
    const int home = search.roots == nullptr ? ROOT : search.roots[row];

    __device__ BeamSearch(const Search& search_, const Lexicon& lexicon_, const Grams& grams_, unsigned char* shared)
        : search(search_), lexicon(lexicon_), grams(grams_), memory(*reinterpret_cast<BeamMemory<Shape>*>(shared)),
          selection{memory.selection} {
        const int columns = labels + 2 > grams.order ? labels + 2 : grams.order;
        auto* own_table = reinterpret_cast<double*>(shared + (sizeof(BeamMemory<Shape>) + 7) / 8 * 8);
        const bool outside = search.table != nullptr;
        table = outside ? search.table + size_t(utterance) * beam * columns : own_table;
        rows = reinterpret_cast<float*>(outside ? own_table : own_table + beam * columns);
        children = reinterpret_cast<unsigned*>(rows + 2 * labels);
        followed = reinterpret_cast<unsigned short*>(children + beam * mask_words);
    }

    __device__ void run() {
        const int frames = int(search.frames[utterance]);
        fetch_row(0, frames);
        if (search.places == nullptr) start();
        else load();
        list_followed(0);
        __syncthreads();
        for (int t = 0; t < frames; t++) {
            Slots& now = memory.prefixes[t % 2];
            fetch_row(t + 1, frames);
            find_parents(now);
            if (UNIT == Unit::WORD && memory.followed_starts[t % 2]) read_words(now);
            __syncthreads();
            score(now, t % 2);
            __syncthreads();
            choose(t % 2);
            make_prefixes(now, memory.prefixes[(t + 1) % 2], t);
            if (t + 1 < frames) list_followed((t + 1) % 2);
            __syncthreads();
        }
        if (thread < beam) save(memory.prefixes[frames % 2], thread);
    }

  private:
    // The last warp brings rows in and lists their labels, one frame ahead.
    __device__ void fetch_row(int t, int frames) {
        if (warp == WARPS - 1 && t < frames) {
            const float* row = search.log_probs + (size_t(t) * search.batch + utterance) * labels;
            for (int v = lane; v < labels; v += 32) copy_async(smem_address(rows + t % 2 * labels + v), row + v, true);
        }
        copies_commit();
    }

    __device__ void list_followed(int which) {
        if (warp != WARPS - 1) return;
        copies_wait<0>();
        __syncwarp();
        const float* row = rows + which * labels;
        int count = 0;
        bool starts = false;
        for (int first = 0; first < labels; first += 32) {
            const int v = first + lane;
            const bool wanted = v != BLANK && v < labels && row[v] > -__int_as_float(0x7f800000);
            const unsigned mask = __ballot_sync(ALL, wanted);
            if (wanted) followed[which * labels + count + __popc(mask & ((1u << lane) - 1))] = (unsigned short)(v);
            starts |= wanted && __ldg(lexicon.starts_word + v);
            count += __popc(mask);
        }
        starts = __ballot_sync(ALL, starts) != 0;
        if (lane == 0) memory.followed_count[which] = count, memory.followed_starts[which] = starts;
    }

    __device__ void start() {
        if (thread >= beam) return;
        Slots& slots = memory.prefixes[0];
        const bool root = thread == 0;
        slots.in_blank[thread] = root ? 0.0 : none();
        slots.in_label[thread] = none();
        slots.hash[thread] = root ? 0 : DEAD_HASH + thread;
        slots.parent[thread] = root ? ROOT_PARENT : DEAD_PARENT;
        slots.last[thread] = lexicon.space > 0 ? lexicon.space : 0;
        slots.lm[thread] = slots.hot[thread] = 0.0;
        slots.asked[thread] = slots.entry[thread] = slots.length[thread] = slots.words[thread] = 0;
        slots.state[thread] = search.start_state;
        slots.node[thread] = home;
        derive(slots, thread);
        clear(thread);
    }

    // What `save` kept of the prefixes after the frames before.
    __device__ void load() {
        if (thread >= beam) return;
        Slots& slots = memory.prefixes[0];
        const size_t at = size_t(row) * beam + thread;
        slots.in_blank[thread] = search.halves[at];
        slots.in_label[thread] = search.halves[size_t(search.rows) * beam + at];
        slots.hash[thread] = search.names[4 * at], slots.parent[thread] = search.names[4 * at + 1];
        slots.last[thread] = int(search.names[4 * at + 2]);
        slots.entry[thread] = -1 - thread;
        slots.state[thread] = int(search.integers[4 * at]), slots.node[thread] = int(search.integers[4 * at + 1]);
        slots.length[thread] = int(search.integers[4 * at + 2]), slots.words[thread] = int(search.integers[4 * at + 3]);
        slots.lm[thread] = search.floats[2 * at], slots.hot[thread] = search.floats[2 * at + 1];
        slots.asked[thread] = 0;
        derive(slots, thread);
        clear(thread);
    }

    __device__ void clear(int slot) {
        memory.parent_slot[slot] = -1;
        for (int w = 0; w < mask_words; w++) children[slot * mask_words + w] = 0;
    }

    // What follows from a prefix's own numbers.
    __device__ void derive(Slots& slots, int k) {
        slots.both[k] = log_add(slots.in_blank[k], slots.in_label[k]);
        slots.base[k] = search.alpha * slots.lm[k] + search.beta * slots.words[k] + slots.hot[k];
        slots.stay[k] = slots.base[k] + unfinished(slots.node[k], slots.length[k]);
        if (UNIT == Unit::WORD) return;
        slots.gain[k] = search.beta + hot_bonus(slots.node[k]);
        if (UNIT == Unit::LABEL) {
            int after = slots.state[k];
            const bool after_space = lexicon.space >= 0 && slots.length[k] == 0 && slots.words[k] > 0;
            slots.word_score[k] = 0.0;
            if (after_space) slots.word_score[k] = read_word(grams, after, __ldg(grams.label_ids + lexicon.space), after);
            slots.word_state[k] = after;
        }
    }

    __device__ double hot_bonus(int node) const {
        return lexicon.has_hot ? __ldg(lexicon.hot + node) : 0.0;
    }

    __device__ double unfinished(int node, int length) const {
        if (UNIT == Unit::WORD && node == OFF && !search.closed) {
            const double share = length / TYPICAL_WORD_CHARACTERS;
            return search.unknown_score / LN_10 * (share > 1.0 ? share : 1.0);
        }
        return lexicon.has_hot || search.closed ? __ldg(lexicon.unfinished + node) : 0.0;
    }

    __device__ int walk(int node, int label) const {
        if (UNIT != Unit::WORD && !lexicon.has_hot) return node;
        for (int position = 0; position < lexicon.longest; position++) {
            const int code = int(__ldg(lexicon.characters + label * lexicon.longest + position));
            if (code != 0) node = __ldg(lexicon.children + (long long)(node)*lexicon.width + code);
        }
        return node;
    }

    // Where prefix k spells on by a label: after a whole word where the next one starts.
    __device__ int spell(const Slots& now, int k, int label) const {
        int node = now.node[k];
        if (now.length[k] > 0 && __ldg(lexicon.starts_word + label)) {
            node = __ldg(lexicon.follow + node);
            if (node == 0) node = home;
        }
        return walk(node, label);
    }

    // Where the beam holds a prefix without its last label, that one must not grow by the label again.
    __device__ void find_parents(const Slots& now) {
        constexpr int PARTS = THREADS / SLOTS;
        const int k = thread % SLOTS;
        if (k >= beam) return;
        const long long parent = now.parent[k];
        for (int j = thread / SLOTS; j < beam; j += PARTS) {
            if (now.hash[j] != parent) continue;
            memory.parent_slot[k] = j;
            atomicOr(children + j * mask_words + now.last[k] / 32, 1u << now.last[k] % 32);
        }
    }

    // Ends every unfinished word: all histories that a word may be looked for in are searched at once.
    __device__ void read_words(Slots& slots) {
        int* entries = reinterpret_cast<int*>(table);
        float* backoffs = reinterpret_cast<float*>(entries + beam * grams.order);
        for (int task = thread; task < beam * grams.order; task += THREADS) {
            const int k = task % beam;
            if (slots.length[k] == 0 || slots.asked[k]) continue;
            const long long word = __ldg(lexicon.word + slots.node[k]);
            int state = slots.state[k], left = task / beam;
            for (; left > 0 && state != 0; left--) state = __ldg(grams.suffix + state);
            entries[task] = left > 0 ? -1 : find_entry(grams, state, word < 0 ? grams.unknown : int(word));
            backoffs[task] = __ldg(grams.backoff + state);
        }
        __syncthreads();
        const int k = thread;
        if (k >= beam || slots.length[k] == 0 || slots.asked[k]) return;
        int level = k;
        float penalty = 0.0f;
        for (; entries[level] < 0; level += beam) penalty += backoffs[level];
        const bool known = __ldg(lexicon.word + slots.node[k]) >= 0;
        const float read = __ldg(grams.log_prob + entries[level]) + penalty;
        const double score = double(read) + (known ? 0.0 : search.unknown_score);
        const bool barred = search.closed && !__ldg(lexicon.is_word + slots.node[k]);
        slots.word_score[k] = score;
        slots.word_state[k] = __ldg(grams.next_state + entries[level]);
        slots.gain[k] = barred ? none() : search.beta + hot_bonus(slots.node[k]) + search.alpha * score;
        slots.asked[k] = 1;
    }

    // Log-prob of the alignments by which prefix k grows by a label.
    __device__ double grow(const Slots& now, const float* row, int k, int label) const {
        if (label == lexicon.space && now.length[k] == 0) return none();  // a second space changes nothing
        bool repeats = now.last[k] == label;
        if (lexicon.sounds != nullptr) repeats = __ldg(lexicon.sounds + now.last[k]) == __ldg(lexicon.sounds + label);
        return (repeats ? now.in_blank[k] : now.both[k]) + row[label];
    }

    // Log-prob of a label in a model of labels; a space is read with the label after it.
    __device__ double read_label(const Slots& now, int k, int label, int& after) const {
        if (label == lexicon.space) {
            after = now.state[k];
            return 0.0;
        }
        return read_word(grams, now.word_state[k], __ldg(grams.label_ids + label), after) + now.word_score[k];
    }

    __device__ void score(const Slots& now, int which) {
        const float* row = rows + which * labels;
        const int count = memory.followed_count[which];
        selection.clear();
        double best = none();
        const int k = THREADS - 1 - thread;  // the first threads have more of the rest to do
        if (k < beam) {
            memory.kept[k] = memory.kept[beam + k] = 0;
            const int last = now.last[k], parent = memory.parent_slot[k];
            const bool boundary = lexicon.space >= 0 && now.length[k] == 0;
            const double stay_blank = now.both[k] + row[BLANK];
            double stay_label = boundary ? now.both[k] + row[lexicon.space] : now.in_label[k] + row[last];
            if (parent >= 0) stay_label = log_add(stay_label, grow(now, row, parent, last));
            memory.stay_blank[k] = stay_blank;
            memory.stay_label[k] = stay_label;
            table[k] = stay_blank + now.stay[k];
            table[beam + k] = stay_label + now.stay[k];
            best = table[k] > table[beam + k] ? table[k] : table[beam + k];
        }
        for (int candidate = thread; candidate < beam * count; candidate += THREADS) {
            const int from = unsigned(candidate) / unsigned(count);
            const int label = followed[which * labels + candidate - from * count];
            double value = grow(now, row, from, label);
            if (children[from * mask_words + label / 32] >> label % 32 & 1) value = none();
            if (value > none()) value += worth(now, from, label);
            table[2 * beam + candidate] = value;
            best = value > best ? value : best;
        }
        selection.offer(best);
    }

    // What prefix k is worth, beside its acoustics, once it has grown by a label.
    __device__ double worth(const Slots& now, int k, int label) const {
        const bool starts = __ldg(lexicon.starts_word + label);
        const int length = now.length[k];
        const int node = spell(now, k, label);
        double value = now.base[k] + unfinished(node, (starts ? 0 : length) + int(__ldg(lexicon.counts + label)));
        if (starts && length > 0) value += now.gain[k];
        int after;
        if (UNIT == Unit::LABEL) value += search.alpha * read_label(now, k, label, after);
        return value;
    }

    // Lists the candidates of the next beam in memory.chosen, -1 where there are no more.
    __device__ void choose(int which) {
        if (thread < beam) memory.chosen[thread] = -1;
        const int count = beam * (2 + memory.followed_count[which]);
        selection.choose(table, count, beam, search.prune, [this](int rank, int candidate) {
            memory.chosen[rank] = candidate;
            if (candidate < 2 * beam) memory.kept[candidate] = 1;
        });
    }

    __device__ void make_prefixes(const Slots& now, Slots& next, int t) {
        const int slot = thread;
        if (slot >= beam) return;
        const int candidate = memory.chosen[slot], which = t % 2;
        clear(slot);
        if (candidate >= 2 * beam) {
            const int count = memory.followed_count[which], place = candidate - 2 * beam;
            const int from = unsigned(place) / unsigned(count);
            grow_prefix(now, next, from, followed[which * labels + place - from * count], slot, t);
            return;
        }
        const int k = candidate < 0 ? 0 : candidate % beam;
        const bool blank = candidate >= 0 && candidate < beam;
        const bool alive = blank || (candidate >= beam && !memory.kept[k]);  // the slot of the blank half holds both
        next.in_blank[slot] = blank ? memory.stay_blank[k] : none();
        next.in_label[slot] = alive && memory.kept[beam + k] ? memory.stay_label[k] : none();
        next.both[slot] = log_add(next.in_blank[slot], next.in_label[slot]);
        next.hash[slot] = alive ? now.hash[k] : DEAD_HASH + slot;
        next.parent[slot] = alive ? now.parent[k] : DEAD_PARENT;
        next.lm[slot] = now.lm[k], next.hot[slot] = now.hot[k];
        next.base[slot] = now.base[k], next.stay[slot] = now.stay[k], next.gain[slot] = now.gain[k];
        next.word_score[slot] = now.word_score[k], next.word_state[slot] = now.word_state[k];
        next.asked[slot] = now.asked[k];
        next.last[slot] = now.last[k], next.entry[slot] = now.entry[k];
        next.state[slot] = now.state[k], next.node[slot] = now.node[k];
        next.length[slot] = now.length[k], next.words[slot] = now.words[k];
    }

    __device__ void grow_prefix(const Slots& now, Slots& next, int k, int label, int slot, int t) {
        const bool starts = __ldg(lexicon.starts_word + label), done = starts && now.length[k] > 0;
        int state = now.state[k];
        double lm = now.lm[k];
        if (UNIT == Unit::LABEL) lm += read_label(now, k, label, state);
        if (UNIT == Unit::WORD && done) lm += now.word_score[k], state = now.word_state[k];
        const long long hash = now.hash[k];
        const auto mixed = ((unsigned long long)(hash) ^ (label + 1ull) * 0x9E3779B97F4A7C15ull) * 6364136223846793005ull;
        next.in_blank[slot] = none();
        next.in_label[slot] = grow(now, rows + t % 2 * labels, k, label);
        next.hash[slot] = (long long)(mixed) ^ hash >> 29;
        next.parent[slot] = hash;
        next.lm[slot] = lm;
        next.hot[slot] = now.hot[k] + (done ? hot_bonus(now.node[k]) : 0.0);
        next.asked[slot] = 0;
        next.last[slot] = label;
        next.entry[slot] = t * beam + slot + 1;
        next.state[slot] = state;
        next.node[slot] = spell(now, k, label);
        next.length[slot] = (starts ? 0 : now.length[k]) + int(__ldg(lexicon.counts + label));
        next.words[slot] = now.words[k] + done;
        derive(next, slot);
        search.grown[(size_t(utterance) * search.length + t) * beam + slot] = make_int2(now.entry[k], label);
    }

    __device__ void save(const Slots& slots, int k) {
        const size_t at = size_t(row) * beam + k;
        search.halves[at] = slots.in_blank[k];
        search.halves[size_t(search.rows) * beam + at] = slots.in_label[k];
        const long long names[4] = {slots.hash[k], slots.parent[k], slots.last[k], slots.entry[k]};
        const long long integers[4] = {slots.state[k], slots.node[k], slots.length[k], slots.words[k]};
        for (int i = 0; i < 4; i++) search.names[4 * at + i] = names[i], search.integers[4 * at + i] = integers[i];
        search.floats[2 * at] = slots.lm[k];
        search.floats[2 * at + 1] = slots.hot[k];
    }
};

}  // namespace ds2
