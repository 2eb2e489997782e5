// Copies new keys and values to the ends of their rows; after rows.cu. Strides and head sizes are in
// bytes; head sizes count stored bytes. Arguments are 64-bit words, see vmkv/core/_native/launch.c.

__device__ void put_token(const char* from, word from_head_stride, const float* inverse, char* to,
                          word heads, word head_bytes) {
  const word per_head = head_bytes / sizeof(Stored);
  for (word i = threadIdx.x; i < heads * per_head; i += blockDim.x) {
    const char* source = from + (i / per_head) * from_head_stride;
    reinterpret_cast<Stored*>(to)[i] = stored(
        reinterpret_cast<const Numbers*>(source)[i % per_head], scale_of(inverse, i / per_head));
  }
}

extern "C" __global__ void append(
    const char* key, word key_sequence_stride, word key_token_stride, word key_head_stride,
    const char* value, word value_sequence_stride, word value_token_stride, word value_head_stride,
    char* keys, char* values, word row_stride, word token_stride,
    word k_heads, word k_head_bytes, word v_heads, word v_head_bytes,
    word tokens_per_sequence, word first_position,
    const int* row_indices, const int* num_tokens, const int* query_starts,
    const float* inverse_keys, const float* inverse_values) {
  const word token = blockIdx.x;
  word sequence, at, row, position;
  if (row_indices == nullptr) {  // Row b is sequence b, and all are equally long.
    sequence = token / tokens_per_sequence;
    at = token % tokens_per_sequence;
    row = sequence;
    position = first_position + at;
  } else {  // Packed, and `tokens_per_sequence` is how many sequences there are.
    const word low = sequence_of(token, query_starts, tokens_per_sequence);
    sequence = 0;
    at = token;
    row = row_indices[low];
    position = num_tokens[low] - (query_starts[low + 1] - token);
    if (position < 0) return;  // Padding.
  }
  const word target = row * row_stride + position * token_stride;
  put_token(key + sequence * key_sequence_stride + at * key_token_stride, key_head_stride,
            inverse_keys, keys + target, k_heads, k_head_bytes);
  put_token(value + sequence * value_sequence_stride + at * value_token_stride, value_head_stride,
            inverse_values, values + target, v_heads, v_head_bytes);
}
