#include "base/crc.h"

#include <libdeflate.h>

namespace torch_ckpt {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // Reflected: bit 31 is x^0.
constexpr uint32_t kOne = 0x80000000;         // x^0.

// a * b modulo the polynomial, over GF(2).
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

}  // namespace

uint32_t crc32(uint32_t crc, Bytes bytes) {
  // libdeflate interprets a null pointer as a request to start over.
  if (bytes.empty()) return crc;
  return libdeflate_crc32(crc, bytes.data(), bytes.size());
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, int64_t nbytes_b) {
  // Appending nbytes_b bytes multiplies the CRC of A by x^(8 * nbytes_b): square and multiply.
  uint32_t shift = kOne;
  uint32_t power = kOne >> 8;  // x^8, one byte.
  for (int64_t n = nbytes_b; n > 0; n >>= 1) {
    if (n & 1) shift = multiply(shift, power);
    power = multiply(power, power);
  }
  return multiply(shift, crc_a) ^ crc_b;
}

}  // namespace torch_ckpt
