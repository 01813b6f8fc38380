// Decoder layers of the Llama shape over packed tokens, and the whole forward from token ids to logits. Values are
// rounded to bfloat16 where transformers' layers round them. Nothing is kept between calls.

#include <omp.h>

#include <memory>
#include <vector>

#include "attention.h"

using namespace specplug;

extern "C" {

// A norm of the heads that is null is left out. Two rows of gate_up's panels stand for one gated value: 16 outputs of
// the gate, then the same 16 of what it gates.
struct Layer {
  Linear query_key_value, output, gate_up, down;
  const bf16 *input_norm, *mlp_norm, *query_norm, *key_norm;
  bf16 *keys, *values;  // [rows, num_kv_heads, capacity, head_dim]
  int64_t capacity;
  int64_t kind;
  bf16* tap;  // [T, hidden_size]: takes what the layer puts out
};

struct Shape {
  Heads heads;
  float norm_eps;
  int64_t hidden_size, intermediate_size;
};

// T tokens of `rows` rows: row r has tokens starts[r] to starts[r + 1], and held lengths[r] entries before.
struct Step {
  int64_t rows;
  const int64_t *starts, *lengths;
  const int64_t* positions;  // [T]; null where no tree is: a token stands where its entry does
  const bf16 *cos, *sin;  // [num_positions, head_dim]; the sines of the first half are negated
  int64_t num_positions;
  const Kind* kinds;
  int64_t threads;

  int64_t tokens() const { return starts[rows]; }
  int64_t place_in_row(int64_t row, int64_t token) const { return lengths[row] + token - starts[row]; }
};

// Room for T tokens each.
struct Scratch {
  bf16 *states, *normed, *heads, *attended, *gated;
};

}  // extern "C"

namespace {

void normalise(const bf16* x, int64_t size, float eps, const bf16* weight, bf16* y) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 values = load(x + i);
    squares = _mm512_fmadd_ps(values, values, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < size; i += 16)
    store(y + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(x + i), scale)), load(weight + i)));
}

void turn(bf16* head, int64_t dim, const bf16* cos, const bf16* sin) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __m512 left = load(head + i), right = load(head + half + i);
    store(head + i, _mm512_add_ps(rounded(_mm512_mul_ps(left, load(cos + i))),
                                  rounded(_mm512_mul_ps(right, load(sin + i)))));
    store(head + half + i, _mm512_add_ps(rounded(_mm512_mul_ps(right, load(cos + half + i))),
                                         rounded(_mm512_mul_ps(left, load(sin + half + i)))));
  }
}

// Queries and keys of a token are normalised and turned; keys and values go to their slot.
void place(const Shape& shape, const Layer& layer, const Step& step, int64_t row, int64_t token, bf16* heads) {
  const Heads& of = shape.heads;
  const int64_t dim = of.head_dim, entry = step.place_in_row(row, token);
  const int64_t position = step.positions == nullptr ? entry : step.positions[token];
  for (int64_t head = 0; head < of.num_heads + of.num_kv_heads; ++head) {
    const bf16* norm = head < of.num_heads ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) normalise(heads + head * dim, dim, shape.norm_eps, norm, heads + head * dim);
    turn(heads + head * dim, dim, step.cos + position * dim, step.sin + position * dim);
  }
  const int64_t slot = entry % step.kinds[layer.kind].size;
  const bf16 *keys = heads + of.num_heads * dim, *values = keys + of.num_kv_heads * dim;
  for (int64_t head = 0; head < of.num_kv_heads; ++head) {
    const int64_t place = ((row * of.num_kv_heads + head) * layer.capacity + slot) * dim;
    std::memcpy(layer.keys + place, keys + head * dim, dim * sizeof(bf16));
    std::memcpy(layer.values + place, values + head * dim, dim * sizeof(bf16));
  }
}

// Queries are cut into more pieces where there are too few rows and heads to keep all threads busy.
std::vector<Task> tasks_of(const Heads& shape, const Step& step) {
  std::vector<Task> tasks;
  tasks.reserve(step.rows * shape.num_kv_heads);  // more where pieces are
  const bool is_narrow = step.rows * shape.num_kv_heads < 4 * step.threads;
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t queries = (step.starts[row + 1] - step.starts[row]) * shape.groups();
    const int64_t most = is_narrow ? kMostRows : kMostQueries;
    const int64_t pieces = (queries + most - 1) / most;
    for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
      for (int64_t piece = 0; piece < pieces; ++piece)
        tasks.push_back({row, kv_head, queries * piece / pieces, queries * (piece + 1) / pieces});
  }
  return tasks;
}

std::vector<int64_t> rows_of(const Step& step) {
  std::vector<int64_t> rows(step.tokens());
  for (int64_t row = 0; row < step.rows; ++row)
    std::fill(rows.begin() + step.starts[row], rows.begin() + step.starts[row + 1], row);
  return rows;
}

// What a step's layers share.
struct Plan {
  std::vector<Task> tasks;
  std::vector<int64_t> rows;

  Plan(const Heads& shape, const Step& step) : tasks(tasks_of(shape, step)), rows(rows_of(step)) {}
};

// The steps after a step, of one token more for each row that has any.
struct Following {
  std::vector<int64_t> rows, last_tokens;  // of the step: the rows that have tokens, and the last token of each
  std::vector<int64_t> starts, lengths;
  Step step;

  explicit Following(const Step& first) : step(first) {
    for (auto* each : {&rows, &last_tokens, &starts, &lengths}) each->reserve(first.rows + 1);
    starts.push_back(0);
    for (int64_t row = 0; row < first.rows; ++row) {
      const int64_t tokens = first.starts[row + 1] - first.starts[row];
      lengths.push_back(first.lengths[row] + tokens);
      if (tokens > 0) {
        rows.push_back(row);
        last_tokens.push_back(first.starts[row + 1] - 1);
      }
      starts.push_back(static_cast<int64_t>(rows.size()));
    }
    step.starts = starts.data();
    step.lengths = lengths.data();
  }
};

// An EAGLE-3 head of one layer: it reads [norm(embedding of a token); norm(feature)], and feeds its output back.
struct Chain {
  Linear features;  // from the target's states to features; without weights where these are features already
  const bf16* embeddings;  // [num_embeddings, hidden_size]
  int64_t num_embeddings;
  const bf16 *embedding_norm, *feature_norm, *output_norm;
  int64_t adds_to_norm;    // whether the layer adds to the normalised feature, not to the feature
  int64_t feeds_back_norm;  // whether what is fed back is normalised too
  Linear output;
  const int64_t* target_ids;  // [outputs]: of each the target's id, below num_embeddings; null: the same
};

using Room = std::unique_ptr<bf16[]>;

Room room_for(int64_t size) { return Room(new bf16[size]); }

bool all_below(const int64_t* values, int64_t count, int64_t limit) {
  return std::all_of(values, values + count, [limit](int64_t value) { return 0 <= value && value < limit; });
}

// more: further tokens of each row that has any in the step.
bool positions_fit(const Step& step, int64_t more = 0) {
  if (step.positions != nullptr) return all_below(step.positions, step.tokens(), step.num_positions);
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t tokens = step.starts[row + 1] - step.starts[row];
    if (tokens > 0 && step.lengths[row] + tokens + more > step.num_positions) return false;
  }
  return true;
}

// Called by all threads of a team. x [rows, in] -> y [rows, out], whatever number out is.
void multiply_out(const Linear& linear, const bf16* x, int64_t rows, bf16* y) {
  product(linear, x, rows, [&](int64_t row, int64_t output, __m512 left, __m512 right) {
    bf16* to = y + row * linear.out + output;
    const int64_t count = linear.out - output;
    if (count >= kPanel) {
      store(to, left);
      store(to + 16, right);
    } else {
      alignas(64) bf16 last[kPanel];
      store(last, left);
      store(last + 16, right);
      std::memcpy(to, last, count * sizeof(bf16));
    }
  });
}

// Called by all threads of a team. The target's states as features [T, hidden_size].
void take_features(const Chain& chain, const bf16* states, int64_t tokens, int64_t hidden, bf16* features) {
  if (chain.features.packed != nullptr) return multiply_out(chain.features, states, tokens, features);
#pragma omp for schedule(static)
  for (int64_t token = 0; token < tokens; ++token)
    std::memcpy(features + token * hidden, states + token * hidden, hidden * sizeof(bf16));
}

// Called by all threads of a team. states: what is added to, and the result; normed: the input of the attention.
void run_layer(const Shape& shape, const Layer& layer, const Step& step, const Plan& plan, const bf16* normed,
               const Scratch& scratch) {
  const Heads& heads = shape.heads;
  const int64_t tokens = step.tokens(), width = heads.width(), hidden = shape.hidden_size;
  const auto add_to_states = [&](int64_t row, int64_t output, __m512 left, __m512 right) {
    bf16* to = scratch.states + row * hidden + output;
    store(to, _mm512_add_ps(rounded(left), load(to)));
    store(to + 16, _mm512_add_ps(rounded(right), load(to + 16)));
  };

  product(layer.query_key_value, normed, tokens, [&](int64_t row, int64_t output, __m512 left, __m512 right) {
    store(scratch.heads + row * width + output, left);
    store(scratch.heads + row * width + output + 16, right);
  });
#pragma omp for schedule(static)
  for (int64_t token = 0; token < tokens; ++token)
    place(shape, layer, step, plan.rows[token], token, scratch.heads + token * width);
#pragma omp for schedule(dynamic, 1)
  for (const Task& task : plan.tasks) {
    const int64_t start = (task.row * heads.num_kv_heads + task.kv_head) * layer.capacity * heads.head_dim;
    attend(task, heads, step.kinds[layer.kind], scratch.heads, step.starts[task.row], step.lengths[task.row],
           layer.keys + start, layer.values + start, scratch.attended);
  }
  product(layer.output, scratch.attended, tokens, add_to_states);
#pragma omp for schedule(static)
  for (int64_t token = 0; token < tokens; ++token)
    normalise(scratch.states + token * hidden, hidden, shape.norm_eps, layer.mlp_norm, scratch.normed + token * hidden);
  product(layer.gate_up, scratch.normed, tokens, [&](int64_t row, int64_t output, __m512 gate, __m512 up) {
    gate = rounded(gate);
    const __m512 grown = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    store(scratch.gated + row * shape.intermediate_size + output / 2,
          _mm512_mul_ps(rounded(_mm512_div_ps(gate, grown)), rounded(up)));
  });
  product(layer.down, scratch.gated, tokens, add_to_states);
  if (layer.tap != nullptr) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; ++token)
      std::memcpy(layer.tap + token * hidden, scratch.states + token * hidden, hidden * sizeof(bf16));
  }
}

}  // namespace

extern "C" {

// normed [T, in of query_key_value]; scratch.states [T, hidden_size] is what the layer adds to.
// Returns 0, and does nothing, if a position is out of range.
int specplug_layer(const Shape* shape, const Layer* layer, const Step* step, const bf16* normed,
                   const Scratch* scratch) {
  if (!positions_fit(*step)) return 0;
  const Plan plan(shape->heads, *step);
#pragma omp parallel num_threads(static_cast<int>(step->threads))
  run_layer(*shape, *layer, *step, plan, normed, *scratch);
  return 1;
}

// x [rows, size] -> y [rows, size].
void specplug_norm(const bf16* x, int64_t rows, int64_t size, float eps, const bf16* weight, bf16* y) {
  for (int64_t row = 0; row < rows; ++row) normalise(x + row * size, size, eps, weight, y + row * size);
}

// Reads the tokens of `step`, whose ids and target's states come in, and drafts `count` tokens after the last of each of
// the n rows that has any: drafted, probabilities [n, count], the target's ids and their shares. Returns 0, and does
// nothing, if an id or a position is out of range.
int specplug_chain(const Shape* shape, const Layer* layer, const Step* step, const Chain* chain, int64_t count,
                   const int64_t* token_ids, const bf16* states, const Scratch* scratch, int64_t* drafted,
                   float* probabilities) {
  const int64_t hidden = shape->hidden_size, outputs = chain->output.out, num_read = step->tokens();
  if (!all_below(token_ids, num_read, chain->num_embeddings) || !positions_fit(*step, count - 1)) return 0;
  Following next(*step);
  const Plan reading(shape->heads, *step), drafting(shape->heads, next.step);
  const int64_t rows = next.step.tokens();
  const Room features = room_for(num_read * hidden), joined = room_for(2 * num_read * hidden),
             logits = room_for(rows * outputs);
  std::vector<int64_t> ids(token_ids, token_ids + num_read);
#pragma omp parallel num_threads(static_cast<int>(step->threads))
  for (int64_t depth = 0; depth < count; ++depth) {
    const Step& now = depth == 0 ? *step : next.step;
    const int64_t tokens = now.tokens();
    if (depth == 0) take_features(*chain, states, tokens, hidden, features.get());
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; ++token) {
      bf16 *left = joined.get() + 2 * token * hidden, *right = left + hidden, *feature = features.get() + token * hidden;
      normalise(chain->embeddings + ids[token] * hidden, hidden, shape->norm_eps, chain->embedding_norm, left);
      normalise(feature, hidden, shape->norm_eps, chain->feature_norm, right);
      std::memcpy(scratch->states + token * hidden, chain->adds_to_norm ? right : feature, hidden * sizeof(bf16));
    }
    run_layer(*shape, *layer, now, depth == 0 ? reading : drafting, joined.get(), *scratch);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t last = depth == 0 ? next.last_tokens[row] : row;
      bf16 *output = scratch->states + last * hidden, *normed = scratch->normed + row * hidden;
      normalise(output, hidden, shape->norm_eps, chain->output_norm, normed);
      std::memcpy(features.get() + row * hidden, chain->feeds_back_norm ? normed : output, hidden * sizeof(bf16));
    }
    multiply_out(chain->output, scratch->normed, rows, logits.get());
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const Likeliest found = likeliest(logits.get() + row * outputs, outputs);
      ids[row] = chain->target_ids == nullptr ? found.index : chain->target_ids[found.index];
      drafted[row * count + depth] = ids[row];
      probabilities[row * count + depth] = found.probability;
      if (depth > 0) ++next.lengths[next.rows[row]];
    }
  }
  return 1;
}

// logits [rows, size] -> the first of each row's largest, and its probability.
void specplug_likeliest(const bf16* logits, int64_t rows, int64_t size, int64_t threads, int64_t* ids,
                        float* probabilities) {
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const Likeliest found = likeliest(logits + row * size, size);
    ids[row] = found.index;
    probabilities[row] = found.probability;
  }
}

// x [rows, in] -> y [rows, out].
void specplug_linear(const Linear* linear, const bf16* x, int64_t rows, int64_t threads, bf16* y) {
#pragma omp parallel num_threads(static_cast<int>(threads))
  multiply_out(*linear, x, rows, y);
}

// The products alone, each of rows[i] times linears[i] after the one before, whatever x and y hold: room for the widest.
// What else a head does is measured beside it.
void specplug_products(const Linear* linears, const int64_t* rows, int64_t count, int64_t threads, const bf16* x,
                       bf16* y) {
#pragma omp parallel num_threads(static_cast<int>(threads))
  for (int64_t index = 0; index < count; ++index) multiply_out(linears[index], x, rows[index], y);
}

// Token ids of the step [T] -> logits [num_logits, vocab] of the tokens `wanted`. Returns 0, and does nothing, if an
// id, a position or a wanted token is out of range.
int specplug_forward(const Shape* shape, const Layer* layers, int64_t num_layers, const Step* step,
                     const int64_t* token_ids, const bf16* embeddings, int64_t num_embeddings, bf16* embeddings_tap,
                     const bf16* final_norm, const Linear* head, const int64_t* wanted, int64_t num_wanted,
                     const Scratch* scratch, bf16* logits) {
  const int64_t hidden = shape->hidden_size, tokens = step->tokens();
  if (!all_below(token_ids, tokens, num_embeddings) || !positions_fit(*step) ||
      !all_below(wanted, num_wanted, tokens) || num_wanted > tokens)
    return 0;
  const Plan plan(shape->heads, *step);
  for (int64_t token = 0; token < tokens; ++token)
    std::memcpy(scratch->states + token * hidden, embeddings + token_ids[token] * hidden, hidden * sizeof(bf16));
  if (embeddings_tap != nullptr) std::memcpy(embeddings_tap, scratch->states, tokens * hidden * sizeof(bf16));
#pragma omp parallel num_threads(static_cast<int>(step->threads))
  for (int64_t index = 0; index < num_layers; ++index) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; ++token)
      normalise(scratch->states + token * hidden, hidden, shape->norm_eps, layers[index].input_norm,
                scratch->normed + token * hidden);
    run_layer(*shape, layers[index], *step, plan, scratch->normed, *scratch);
  }
  for (int64_t i = 0; i < num_wanted; ++i)
    normalise(scratch->states + wanted[i] * hidden, hidden, shape->norm_eps, final_norm, scratch->normed + i * hidden);
  specplug_linear(head, scratch->normed, num_wanted, step->threads, logits);
  return 1;
}

}  // extern "C"
