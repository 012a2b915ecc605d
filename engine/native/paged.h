// A few queries of one KV head against a stretch of their context: online softmax over chunks
// (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135), all query heads of the
// KV head together.  Keys are transposed into panels, values copied, and both products are those
// of tile.h, so that prefill and decode are one code.
#pragma once
#include <algorithm>
#include <cmath>

#include "tile.h"

namespace {

constexpr int64_t CHUNK = 64;     // positions scored at a time
constexpr int64_t TILE = 96;      // query rows (queries x heads of a group) of a task, about
constexpr float LOWEST = -1e30f;  // below every score, and finite: LOWEST - LOWEST is 0
static_assert(CHUNK % COLUMNS == 0, "a full chunk is whole panels");

struct Work {
    int64_t first_row, queries, start;
};

// Works of one query each whose first `segments` segments lie in the same blocks: `count` members
// from `first` on.
struct Sharing {
    int64_t first, count, segments;
};

// The same for all layers of a step.  Field for field `engine.native.library.Context`.
struct Context {
    void* kv;            // [blocks, layers, 2, kv_heads, block_size, head_dim]
    int64_t bfloat16;    // else float32
    int64_t strides[4];  // of the first four dimensions, in numbers; the last two are contiguous
    int64_t kv_heads, block_size, head_dim;
    const Work* works;
    int64_t count;
    const int64_t* tables;  // [works, table_stride]: block ids
    int64_t table_stride;
    const Sharing* sharings;
    int64_t sharing_count;
    const int64_t* members;  // works, of one sharing after the other
    float scale;
};

struct Inputs {
    int64_t heads, layer, window;  // window 0: everything before is seen
    Rows<const float> query, key, value;
    float* out;  // [T, heads, head_dim]
};

// Queries first to first + queries - 1 of a work against positions begin to end - 1, for one KV
// head.  part: where the unfinished result goes; -1: this is all of it.  member: the queries are
// those of as many members of a sharing, from this one on; -1: of the work.
struct Task {
    int64_t work, head, first, queries, begin, end, part, member;
};

// `count` parts from `first` on, in which the queries of a task begin at `query`.
struct Parts {
    int64_t first, count, query;
};

// What the result of a task is made of, from the first position to the last.
struct Merge {
    Task task;
    Parts shared, own;
};

// Of each query row: sums [width] not yet divided by the total of the weights, the greatest score,
// that total.
struct Result {
    float* at;
    int64_t width;
    int64_t stride() const { return width + COLUMNS; }
    float* sums(int64_t i) const { return at + i * stride(); }
    float& greatest(int64_t i) const { return at[i * stride() + width]; }
    float& total(int64_t i) const { return at[i * stride() + width + 1]; }
    Result from(int64_t i) const { return {sums(i), width}; }
};

struct Pointers;
struct Queries;
struct Keys;
struct Values;
struct Scores;
struct Sums;

int64_t tile_queries(const Context& of, const Inputs& in) {
    return std::max<int64_t>(1, TILE * of.kv_heads / in.heads);
}

int64_t padded(int64_t n) { return (n + COLUMNS - 1) / COLUMNS * COLUMNS; }

// T: how the pool stores a number.
template <class T>
class Paged {
    const Context& of;
    const Inputs& in;
    const int64_t group = in.heads / of.kv_heads;
    const int64_t width = padded(of.head_dim);
    const int64_t to_value = of.strides[2];  // from the key of a position

   public:
    Paged(const Context& of, const Inputs& in) : of(of), in(in) {}

    int64_t part_floats() const {
        return tile_queries(of, in) * group * Result{nullptr, width}.stride();
    }

    // Writes the keys and values of this step.
    void remember(int64_t work) const {
        const Work& own = of.works[work];
        for (int64_t q = 0; q < own.queries; q++)
            for (int64_t head = 0; head < of.kv_heads; head++) {
                const float* key = in.key.from(own.first_row + q).at + head * of.head_dim;
                const float* value = in.value.from(own.first_row + q).at + head * of.head_dim;
                T* to = key_of(work, head, own.start + q);
                for (int64_t d = 0; d < of.head_dim; d++) {
                    from_float(to + d, key[d]);
                    from_float(to + to_value + d, value[d]);
                }
            }
    }

    // following: what this thread is likely to do next.
    void attend(const Task& task, const Task& following, float* parts) const {
        int64_t rows = task.queries * group, count = task.end - task.begin;
        float* own = scratch<Sums>(part_floats());
        Result result{task.part < 0 ? own : parts + task.part * part_floats(), width};
        std::fill_n(result.at, rows * result.stride(), 0.0f);
        for (int64_t i = 0; i < rows; i++) result.greatest(i) = LOWEST;
        float* queries = scratch<Queries>(rows * of.head_dim);
        stage_queries(task, queries);
        const T** keys = scratch<Pointers, const T*>(count + CHUNK);
        locate(task, count, keys);
        locate(following, CHUNK, keys + count);
        for (int64_t p = 0; p < count; p += CHUNK)
            chunk(task, keys, p, std::min(CHUNK, count - p), queries, result);
        if (task.part < 0) finish(task, result);
    }

    void merge(const Merge& merge, float* parts) const {
        int64_t rows = merge.task.queries * group, count = merge.shared.count + merge.own.count;
        Result whole = part_of(merge, 0, parts);
        for (int64_t part = 1; part < count; part++)
            for (int64_t i = 0; i < rows; i++) {
                Result next = part_of(merge, part, parts);
                float greatest = std::max(whole.greatest(i), next.greatest(i));
                float old_share = exp(splat(whole.greatest(i) - greatest))[0];
                float new_share = exp(splat(next.greatest(i) - greatest))[0];
                whole.greatest(i) = greatest;
                whole.total(i) = whole.total(i) * old_share + next.total(i) * new_share;
                for (int64_t d = 0; d < width; d++)
                    whole.sums(i)[d] = whole.sums(i)[d] * old_share + next.sums(i)[d] * new_share;
            }
        finish(merge.task, whole);
    }

   private:
    struct Place {
        int64_t row, position;
    };

    Place place_of(const Task& task, int64_t query) const {
        if (task.member >= 0) {
            const Work& own = of.works[of.members[task.member + query]];
            return {own.first_row, own.start};
        }
        const Work& own = of.works[task.work];
        return {own.first_row + task.first + query, own.start + task.first + query};
    }

    Result part_of(const Merge& merge, int64_t number, float* parts) const {
        bool is_shared = number < merge.shared.count;
        const Parts& in = is_shared ? merge.shared : merge.own;
        int64_t part = in.first + number - (is_shared ? 0 : merge.shared.count);
        return Result{parts + part * part_floats(), width}.from(in.query * group);
    }

    T* key_of(int64_t work, int64_t head, int64_t position) const {
        int64_t block = of.tables[work * of.table_stride + position / of.block_size];
        return (T*)of.kv + block * of.strides[0] + in.layer * of.strides[1] + head * of.strides[3] +
               position % of.block_size * of.head_dim;
    }

    // Where the keys of the first `count` positions are; past the end the last one is repeated.
    void locate(const Task& task, int64_t count, const T** keys) const {
        for (int64_t p = 0; p < count; p++) {
            int64_t position = std::min(task.begin + p, task.end - 1);
            bool follows = p && position == task.begin + p && position % of.block_size;
            keys[p] = follows ? keys[p - 1] + of.head_dim
                              : key_of(task.work, task.head, position);
        }
    }

    // What comes after this chunk is fetched meanwhile, by as many positions as a page may hold.
    void chunk(const Task& task, const T** keys, int64_t first, int64_t count,
               const float* queries, const Result& result) const {
        int64_t rows = task.queries * group, columns = padded(count), dim = of.head_dim;
        float* panels = scratch<Keys>(CHUNK * dim);
        float* values = scratch<Values>(CHUNK * width);
        float* scores = scratch<Scores>(rows * CHUNK);
        const T** next = keys + first + count;
        std::fill_n(scores, rows * columns, 0.0f);
        stage_keys(keys + first, count, panels);
        for (int64_t p = 0; p < columns; p += COLUMNS)
            tiles(Float32Panel{panels + p * dim, COLUMNS}, {queries, dim}, rows, 0, dim,
                  {scores + p, columns}, next[p], COLUMNS * dim * sizeof(T));
        for (int64_t i = 0; i < rows; i++) {
            hide(task, i, task.begin + first, columns, scores + i * columns);
            weigh(scores + i * columns, columns, result, i);
        }
        stage_values(keys + first, count, values);
        for (int64_t d = 0; d < width; d += COLUMNS)
            tiles(Float32Panel{values + d, width}, {scores, columns}, rows, 0, count,
                  {result.sums(0) + d, result.stride()}, next[CHUNK * d / width] + to_value,
                  CHUNK * COLUMNS * dim / width * sizeof(T));
    }

    // As panels [columns / COLUMNS, head_dim, COLUMNS]; the last position fills the last columns.
    void stage_keys(const T** keys, int64_t count, float* to) const {
        const int64_t dim = of.head_dim;
        for (int64_t p = 0; p < padded(count); p += W) {
            const T* rows[W];
            for (int i = 0; i < W; i++) rows[i] = keys[std::min(p + i, count - 1)];
            float* columns = to + p / COLUMNS * COLUMNS * dim + p % COLUMNS;
            int64_t d = 0;
            for (; d + W <= dim; d += W) {
                Vec square[W];
                for (int i = 0; i < W; i++) square[i] = load_as_float(rows[i] + d);
                transpose(square);
                for (int i = 0; i < W; i++) store(columns + (d + i) * COLUMNS, square[i]);
            }
            for (; d < dim; d++)
                for (int i = 0; i < W; i++) columns[d * COLUMNS + i] = one_as_float(rows[i] + d);
        }
    }

    // As [count, width], padded with zeros.
    void stage_values(const T** keys, int64_t count, float* to) const {
        const int64_t dim = of.head_dim, wide = width, values = to_value;
        for (int64_t p = 0; p < count; p++, to += wide) {
            const T* from = keys[p] + values;
            int64_t d = 0;
            for (; d + W <= dim; d += W) store(to + d, load_as_float(from + d));
            for (; d < dim; d++) to[d] = one_as_float(from + d);
            for (; d < wide; d++) to[d] = 0;
        }
    }

    // Scaled, as [queries x group, head_dim].
    void stage_queries(const Task& task, float* to) const {
        for (int64_t q = 0; q < task.queries; q++) {
            int64_t row = place_of(task, q).row;
            const float* from = in.query.from(row).at + task.head * group * of.head_dim;
            for (int64_t i = 0; i < group * of.head_dim; i++) *to++ = from[i] * of.scale;
        }
    }

    // What a query does not see is -inf: a weight of exactly 0, whatever lies in memory there.
    void hide(const Task& task, int64_t i, int64_t first, int64_t columns, float* scores) const {
        int64_t position = place_of(task, i / group).position;
        int64_t begin = in.window ? position + 1 - in.window - first : 0;
        begin = std::clamp<int64_t>(begin, 0, columns);
        int64_t end = std::clamp<int64_t>(position + 1 - first, begin, columns);
        std::fill(scores, scores + begin, -INFINITY);
        std::fill(scores + end, scores + columns, -INFINITY);
    }

    // Scores become weights relative to the greatest so far; what was summed up before is brought
    // to the same measure.
    void weigh(float* scores, int64_t columns, const Result& result, int64_t i) const {
        Vec each = splat(result.greatest(i));
        for (int64_t j = 0; j < columns; j += W) each = larger(each, load<Vec>(scores + j));
        float greatest = each[0];
        for (int j = 1; j < W; j++) greatest = std::max(greatest, each[j]);
        Vec total{};
        for (int64_t j = 0; j < columns; j += W) {
            Vec weight = exp(load<Vec>(scores + j) - greatest);
            store(scores + j, weight);
            total += weight;
        }
        float shrink = exp(splat(result.greatest(i) - greatest))[0];
        result.greatest(i) = greatest;
        result.total(i) = result.total(i) * shrink + sum(total);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < width; d += W)
                store(result.sums(i) + d, load<Vec>(result.sums(i) + d) * shrink);
    }

    void finish(const Task& task, const Result& result) const {
        for (int64_t i = 0; i < task.queries * group; i++) {
            int64_t row = of.works[task.work].first_row + task.first + i / group;
            float* to = in.out + (row * in.heads + task.head * group + i % group) * of.head_dim;
            for (int64_t d = 0; d < of.head_dim; d++) to[d] = result.sums(i)[d] / result.total(i);
        }
    }
};

}  // namespace
