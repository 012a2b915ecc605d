// Attention over a paged KV pool: what the threads do in which order.
#include "paged.h"

namespace {

constexpr int64_t SEGMENT = 256;  // positions of a task that holds all queries of its work, or of
                                  // a sharing

struct Unfinished;

// A prefix that decodes have in common is attended over once, by the queries of all of them
// (Juravsky et al., arXiv:2402.05099).  Everything long is split at multiples of SEGMENT, shared or
// not, so that what a row gets does not depend on what else is in the batch.
struct Schedule {
    const Context& of;
    const Inputs& in;
    const int64_t most = tile_queries(of, in);
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    std::vector<Parts> shared;  // [works, kv_heads]
    int64_t parts = 0;

    Schedule(const Context& of, const Inputs& in)
        : of(of), in(in), shared(of.count * of.kv_heads) {
        for (int64_t i = 0; i < of.sharing_count && !in.window; i++) share(of.sharings[i]);
        for (int64_t work = 0; work < of.count; work++)
            for (int64_t head = 0; head < of.kv_heads; head++)
                for (int64_t first = 0; first < of.works[work].queries; first += most) {
                    int64_t queries = std::min(most, of.works[work].queries - first);
                    int64_t start = of.works[work].start + first;
                    int64_t begin = shared[work * of.kv_heads + head].count * SEGMENT;
                    if (in.window) begin = std::max<int64_t>(0, start + 1 - in.window);
                    begin = begin / CHUNK * CHUNK;
                    Task task{work, head, first, queries, begin, start + queries, -1, -1};
                    queries < of.works[work].queries ? tasks.push_back(task) : split(task);
                }
    }

    void share(const Sharing& all) {
        for (int64_t done = 0; done < all.count; done += most)
            for (int64_t head = 0; head < of.kv_heads; head++) {
                int64_t member = all.first + done, count = std::min(most, all.count - done);
                for (int64_t i = 0; i < count; i++)
                    shared[of.members[member + i] * of.kv_heads + head] = {parts, all.segments, i};
                Task task{of.members[member], head, 0, count, 0, SEGMENT, parts, member};
                for (; task.part < parts + all.segments; task.part++) {
                    tasks.push_back(task);
                    task.begin = task.end;
                    task.end += SEGMENT;
                }
                parts = task.part;
            }
    }

    void split(Task task) {
        Merge merge{task, shared[task.work * of.kv_heads + task.head], {parts, 0, 0}};
        if (!merge.shared.count && task.end <= (task.begin / SEGMENT + 1) * SEGMENT)
            return tasks.push_back(task);
        for (; task.begin < merge.task.end; task.begin = task.end) {
            task.end = std::min((task.begin / SEGMENT + 1) * SEGMENT, merge.task.end);
            task.part = parts++;
            tasks.push_back(task);
        }
        merge.own.count = parts - merge.own.first;
        merges.push_back(merge);
    }
};

template <class T>
void run(const Context& of, const Inputs& in, int64_t threads) {
    Schedule schedule(of, in);
    Paged<T> paged(of, in);
    float* parts = scratch<Unfinished>(schedule.parts * paged.part_floats());
    int64_t tasks = schedule.tasks.size(), merges = schedule.merges.size();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t i = 0; i < of.count; i++) paged.remember(i);
#pragma omp for schedule(dynamic)
        for (int64_t i = tasks - 1; i >= 0; i--) {
            const Task& following = schedule.tasks[std::max<int64_t>(0, i - threads)];
            paged.attend(schedule.tasks[i], following, parts);
        }
#pragma omp for
        for (int64_t i = 0; i < merges; i++) paged.merge(schedule.merges[i], parts);
    }
}

}  // namespace

// How many positions can be shared; any multiple of it can.
extern "C" int64_t trireme_segment() { return SEGMENT; }

// Writes the keys and values of the step, then attends.  query [T, heads, head_dim], key and value
// [T, kv_heads, head_dim]: contiguous but for the distance of rows.  out: contiguous.
extern "C" void trireme_attention(const Context* of, int64_t heads, int64_t layer, int64_t window,
                                  const float* query, int64_t query_stride, const float* key,
                                  int64_t key_stride, const float* value, int64_t value_stride,
                                  float* out, int64_t threads) {
    Rows<const float> queries{query, query_stride}, keys{key, key_stride};
    Inputs in{heads, layer, window, queries, keys, {value, value_stride}, out};
    of->bfloat16 ? run<uint16_t>(*of, in, threads) : run<float>(*of, in, threads);
}
