"""Messages of any type with legal, odd and absurd values."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor as Field

INTEGERS = (0, 1, 2, 3, 4, 1 << 16, (1 << 31) - 1, (1 << 31), (1 << 32) - 1)
LARGE = (*INTEGERS, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SIGNED = (0, 1, 999_999_999, 1_000_000_000, (1 << 31) - 1, -1, -(1 << 31))
TEXTS = ("", "s", "test/model", "m" * 512, "m" * 513, "a\nb", "\0", "ünïcode", "../../x", "9" * 5000)
BYTES = (b"", b"x", b"k" * 16, b"k" * 32, b"k" * 33, bytes(range(64)), b"\xff" * 4096)
CHOICES = {
    Field.TYPE_STRING: TEXTS,
    Field.TYPE_BYTES: BYTES,
    Field.TYPE_BOOL: (True, False),
    Field.TYPE_UINT64: LARGE,
    Field.TYPE_INT32: SIGNED,
    Field.TYPE_INT64: (*SIGNED, (1 << 63) - 1, -(1 << 63)),
}


class Fuzzer:
    """`known` gives values for fields by name, so that some calls get past the first check."""

    def __init__(self, random, known):
        self._random = random
        self._known = known

    def message(self, kind, depth=0):
        made = kind()
        for field in kind.DESCRIPTOR.fields:
            if self._random.random() < 0.15:
                continue
            if field.is_repeated:
                self._fill(made, field, depth)
            elif field.type == Field.TYPE_MESSAGE:
                getattr(made, field.name).CopyFrom(self.value(made, field, depth))
            else:
                setattr(made, field.name, self.value(made, field, depth))
        return made

    def _fill(self, made, field, depth):
        count = self._random.choice((0, 1, 2, 3) if depth else (1, 2, 3, 30))
        values = [self.value(made, field, depth) for _ in range(count)]
        getattr(made, field.name).extend(values)

    def value(self, made, field, depth):
        known = self._known.get(field.name)
        if known and self._random.random() < 0.85:
            return self._random.choice(known)
        if field.type == Field.TYPE_MESSAGE:
            return self.message(kind_of(made, field), depth + 1)
        if field.type == Field.TYPE_ENUM:
            return self._random.choice((*field.enum_type.values_by_number, 99))
        return self._random.choice(CHOICES.get(field.type, INTEGERS))


def kind_of(made, field):
    """The class of a message field, also of a repeated one."""
    part = getattr(type(made)(), field.name)
    return type(part.add()) if field.is_repeated else type(part)
