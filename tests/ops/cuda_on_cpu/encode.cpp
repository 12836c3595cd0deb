// The trellis search's kernels on a CPU: encode BITS TILES_SIDE_BY_SIDE IN_GLOBAL BLOCKS N LIMIT
// SCALE GAIN. Reads tiles, codebook and table, writes trellis and values, files of the current
// directory.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "cuda/encode/search.cuh"

namespace exl3::cuda {
alignas(128) unsigned char memory[227 * 1024];  // shared
}

namespace {

using namespace exl3;
using namespace exl3::cuda;

EncodeParams params;
SearchHeader header;
unsigned char* blocks;

template <int K, int T, bool kInGlobal>
void kernel() {
  if constexpr (K <= kEncodeCoarseBits)
    coarse_kernel<K, T, kInGlobal>(params, &header, blocks);
  else
    search_kernel<K, T, kInGlobal>(params, &header, blocks);
}

struct Variant {
  int bits, tiles;
  bool in_global;
  void (*run)();
  size_t block_bytes, shared_bytes;
};
template <int K, int T, bool kInGlobal>
constexpr Variant kVariant = {
    K,
    T,
    kInGlobal,
    kernel<K, T, kInGlobal>,
    PlanOf<K, T>::kBlockBytes + (kInGlobal ? kInGlobalBytes<K, T> : 0),
    kInGlobal ? 0 : sizeof(SharedOf<K, T>),
};
const Variant kVariants[] = {kVariant<1, 1, false>, kVariant<1, 1, true>,  kVariant<2, 1, false>,
                             kVariant<2, 2, false>, kVariant<3, 1, false>, kVariant<3, 4, false>,
                             kVariant<4, 2, false>, kVariant<4, 4, false>, kVariant<5, 4, false>,
                             kVariant<8, 2, false>};

template <class T>
std::vector<T> read(const char* name) {
  std::ifstream file(name, std::ios::binary | std::ios::ate);
  std::vector<T> result(file.tellg() / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(result.data()), result.size() * sizeof(T));
  return result;
}

template <class T>
void write(const char* name, const std::vector<T>& data) {
  std::ofstream file(name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(T));
}

void run(const Variant& v, int count) {
  std::vector<unsigned char> workspace(v.block_bytes * count + 256, 0xAB);
  blocks = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256);
  header.next = static_cast<unsigned long long>(v.tiles) * count;
  on_cpu::grid.x = count;
  for (int i = 0; i < count; ++i) {
    on_cpu::block.x = i;
    std::memset(memory, 0xCD, sizeof memory);
    on_cpu::run_block(v.run, i + 1);
  }
}

}  // namespace

int main(int, char** argv) {
  const auto tiles = read<float>("tiles"), codebook = read<float>("codebook");
  const auto table = read<int16_t>("table");
  const int bits = std::stoi(argv[1]), n = std::stoi(argv[5]);
  std::vector<uint16_t> trellis(n * 16 * bits, 0xFFFF);
  std::vector<float> values(n * kTileNumel, NAN);
  params.tiles = tiles.data();
  params.codebook = codebook.data();
  params.table = table.data();
  params.weight_limit = std::stof(argv[6]);
  params.weight_scale = std::stof(argv[7]);
  params.gain = std::stoi(argv[8]);
  params.bits = bits;
  params.n_tiles = n;
  params.trellis = trellis.data();
  params.values = values.data();
  for (const Variant& v : kVariants) {
    if (v.bits != bits || v.tiles != std::stoi(argv[2]) || v.in_global != (argv[3][0] == '1'))
      continue;
    if (v.shared_bytes > sizeof memory) return 2;
    run(v, std::stoi(argv[4]));
    write("trellis", trellis);
    write("values", values);
    return on_cpu::overflowed ? 4 : 0;
  }
  return 5;
}
