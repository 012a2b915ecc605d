// Attention over a paged KV pool: what the threads do in which order.
#include "paged.h"

namespace {

constexpr int64_t SEGMENT = 256;  // positions of a task that holds all queries of its work

struct Parts;

// merges: of what was split, the first part and the number of parts.
struct Schedule {
    std::vector<Task> tasks;
    std::vector<std::pair<Task, int64_t>> merges;
    int64_t parts = 0;

    Schedule(const Context& of, const Inputs& in) {
        int64_t most = tile_queries(of, in);
        for (int64_t work = 0; work < of.count; work++)
            for (int64_t head = 0; head < of.kv_heads; head++)
                for (int64_t first = 0; first < of.works[work].queries; first += most) {
                    int64_t queries = std::min(most, of.works[work].queries - first);
                    int64_t start = of.works[work].start + first;
                    int64_t begin = in.window ? std::max<int64_t>(0, start + 1 - in.window) : 0;
                    begin = begin / CHUNK * CHUNK;
                    Task task{work, head, first, queries, begin, start + queries, -1};
                    queries < of.works[work].queries ? tasks.push_back(task) : split(task);
                }
    }

    // At multiples of SEGMENT, so that a row does not depend on what else is in the batch.
    void split(Task task) {
        int64_t end = task.end, before = parts;
        if (end <= (task.begin / SEGMENT + 1) * SEGMENT) return tasks.push_back(task);
        while (task.begin < end) {
            task.end = std::min((task.begin / SEGMENT + 1) * SEGMENT, end);
            task.part = parts++;
            tasks.push_back(task);
            if (task.part == before) merges.push_back({task, 0});
            task.begin = task.end;
        }
        merges.back().second = parts - before;
    }
};

template <class T>
void run(const Context& of, const Inputs& in, int64_t threads) {
    Schedule schedule(of, in);
    Paged<T> paged(of, in);
    float* parts = scratch<Parts>(schedule.parts * paged.part_floats());
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
        for (int64_t i = 0; i < merges; i++)
            paged.merge(schedule.merges[i].first, schedule.merges[i].second, parts);
    }
}

}  // namespace

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
