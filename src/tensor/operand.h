// A matrix, and the scales of a matrix of few bits: value(i, j) = x(i, j) * scales(i / rows, j /
// columns) of its ScaleBlock.
#pragma once

#include "tensor/view.h"

namespace orrery {

// Rows and columns of a matrix that share one scale; 0 stands for all of them. {0, 0}: one scale;
// {1, 0}: one a row; {0, 1}: one a column; {128, 128}: one a block.
struct ScaleBlock {
  int64_t rows = 0, columns = 0;
  bool operator==(const ScaleBlock&) const = default;

  // Of the scales of a matrix [rows, columns]; the last blocks may be smaller.
  Shape shape_for(const Shape& matrix) const {
    const auto blocks = [](int64_t size, int64_t of) { return of == 0 ? 1 : (size + of - 1) / of; };
    return {blocks(matrix[0], rows), blocks(matrix[1], columns)};
  }
};

struct MutOperand;

// What a product reads. A View converts: values without scales stand for themselves.
struct Operand : View {
  View scales;  // f32, of shape block.shape_for(shape); empty: none
  ScaleBlock block;

  Operand() = default;
  Operand(const View& values) : View(values) {}
  Operand(const MutOperand& written);
  Operand(const View& values, const View& of, ScaleBlock per)
      : View(values), scales(of), block(per) {}

  // Rows (dim 0) or columns (dim 1); a slice begins where a block does.
  Operand slice(int dim, int64_t begin, int64_t size) const;
};

// What a product or a norm writes, when the next one reads few bits.
struct MutOperand : MutView {
  MutView scales;
  ScaleBlock block;

  MutOperand() = default;
  MutOperand(const MutView& values) : MutView(values) {}
  MutOperand(const MutView& values, const MutView& of, ScaleBlock per)
      : MutView(values), scales(of), block(per) {}
  MutOperand slice(int dim, int64_t begin, int64_t size) const;
};

inline Operand::Operand(const MutOperand& written)
    : View(written), scales(written.scales), block(written.block) {}

}  // namespace orrery
