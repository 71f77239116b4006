// Any bytes as text for the shipped tokenizer: ids in range, and decoding gives the normal form of
// the text back. Bytes that begin with { are read as a tokenizer.json too: refused with an Error,
// or a tokenizer whose ids decode.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.h"
#include "text/normal_form.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

// Where the sources are; the corpus is replayed from any folder.
const orrery::Tokenizer& shipped() {
  static const orrery::Tokenizer tokenizer = orrery::Tokenizer::load(
      std::filesystem::path(__FILE__).parent_path().parent_path().parent_path() /
      "models/cosmos3-pico/text_tokenizer");
  return tokenizer;
}

void encode(std::string_view bytes) {
  const std::vector<int64_t> ids = shipped().encode(bytes);
  for (const int64_t id : ids) check(id >= 0 && id < shipped().vocab_size());
  const std::string decoded = shipped().decode(ids);
  // Marks do not compose across an added token, so the texts agree only after composing both.
  check(orrery::nfc(decoded) == orrery::nfc(orrery::valid_utf8(bytes)));
  check(shipped().decode(shipped().encode(decoded)) == decoded);
}

void read(std::string_view bytes) {
  try {
    const orrery::Tokenizer tokenizer = orrery::Tokenizer::from_json(bytes, "fuzz");
    const std::vector<int64_t> ids = tokenizer.encode("A cat's 12  <|im_end|>\n\xc3\xa9");
    for (const int64_t id : ids) check(id >= 0 && id < tokenizer.vocab_size());
    tokenizer.decode(ids);
  } catch (const orrery::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  encode(bytes);
  if (bytes.starts_with("{")) read(bytes);
  return 0;
}
