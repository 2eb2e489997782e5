// Rotates queries and new keys, and appends keys and values; after numbers.cu and rows.cu. Strides are
// in numbers; those of rows are in bytes.

__device__ void turn(Numbers& low, Numbers& high, const Numbers& c0, const Numbers& c1,
                     const Numbers& s0, const Numbers& s1) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = as_float(low.at[i]), y = as_float(high.at[i]);
    low.at[i] = as_number(x * as_float(c0.at[i]) - y * as_float(s0.at[i]));
    high.at[i] = as_number(y * as_float(c1.at[i]) + x * as_float(s1.at[i]));
  }
}

extern "C" __global__ void append_rotated(
    const number* query, word query_token_stride, word query_head_stride, word query_heads,
    const number* key, word key_token_stride, word key_head_stride,
    const number* value, word value_token_stride, word value_head_stride,
    const number* cosine, word cosine_stride, const number* sine, word sine_stride,
    number* out_query, number* out_key,
    char* keys, char* values, word row_stride, word token_stride,
    word heads, word dim, word value_dim,
    const int* row_indices, const int* num_tokens, const int* query_starts, word num_sequences,
    const float* inverse_keys, const float* inverse_values) {
  const word token = blockIdx.x;
  const int half = (int)dim / 2, per_head = half / 8, at = threadIdx.x % per_head;
  const int first_head = threadIdx.x / per_head, step = blockDim.x / per_head;
  const bool turns = first_head < step;
  const Numbers* cosines = reinterpret_cast<const Numbers*>(cosine + token * cosine_stride) + at;
  const Numbers* sines = reinterpret_cast<const Numbers*>(sine + token * sine_stride) + at;
  const Numbers c0 = cosines[0], c1 = cosines[per_head], s0 = sines[0], s1 = sines[per_head];

  for (int head = first_head; turns && head < query_heads; head += step) {
    const number* from = query + token * query_token_stride + head * query_head_stride;
    Numbers first = reinterpret_cast<const Numbers*>(from)[at];
    Numbers second = reinterpret_cast<const Numbers*>(from + half)[at];
    turn(first, second, c0, c1, s0, s1);
    Numbers* to = reinterpret_cast<Numbers*>(out_query + (token * query_heads + head) * dim) + at;
    to[0] = first;
    to[per_head] = second;
  }

  word low = token;
  if (query_starts != nullptr) low = sequence_of(token, query_starts, num_sequences);
  const word behind = query_starts == nullptr ? 1 : query_starts[low + 1] - token;
  const word position = num_tokens[low] - behind;
  const bool is_real = position >= 0;  // Of padding, nothing is written to a row.
  const word target = row_indices[low] * row_stride + position * token_stride;
  for (int head = first_head; turns && head < heads; head += step) {
    const number* from = key + token * key_token_stride + head * key_head_stride;
    Numbers first = reinterpret_cast<const Numbers*>(from)[at];
    Numbers second = reinterpret_cast<const Numbers*>(from + half)[at];
    turn(first, second, c0, c1, s0, s1);
    if (out_key != nullptr) {
      Numbers* to = reinterpret_cast<Numbers*>(out_key + (token * heads + head) * dim) + at;
      to[0] = first;
      to[per_head] = second;
    }
    if (is_real) {
      Stored* to = reinterpret_cast<Stored*>(keys + target) + head * 2 * per_head + at;
      const float by = scale_of(inverse_keys, head);
      to[0] = stored(first, by);
      to[per_head] = stored(second, by);
    }
  }
  const int per_value = (int)value_dim / 8;
  for (int part = threadIdx.x; is_real && part < (int)heads * per_value; part += blockDim.x) {
    const int head = part / per_value;
    const number* from = value + token * value_token_stride + head * value_head_stride;
    reinterpret_cast<Stored*>(values + target)[part] =
        stored(reinterpret_cast<const Numbers*>(from)[part % per_value],
               scale_of(inverse_values, head));
  }
}
