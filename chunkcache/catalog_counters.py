"""A tenant's numbers within a transaction: changes, documents, and what these take."""

from chunkcache.catalog_records import (
    CounterRecord,
    InfoRecord,
    counter_key,
    info_key,
    read_record,
    text_key,
)
from chunkcache.identity import TenantNamespace
from chunkcache.quota import DocumentSize, TenantQuota
from chunkcache.store.records import encode_record
from chunkcache.store.transaction import Database, Transaction


class TenantCounters:
    """The numbers of one tenant.

    Args:
        namespace: The tenant.
        quota: What its documents may take; None is no limit.
    """

    def __init__(self, namespace: TenantNamespace, quota: TenantQuota | None) -> None:
        self._namespace = namespace
        self._quota = quota

    def get(self, txn: Transaction) -> CounterRecord:
        """The numbers now."""
        key = counter_key(self._namespace)
        record = read_record(txn, Database.DOCUMENTS, key, CounterRecord, "a tenant's counters")
        return record or CounterRecord()

    def size_of(self, txn: Transaction, info: InfoRecord) -> DocumentSize:
        """What a stored document takes."""
        namespace, document_id = self._namespace, info.document_id
        keys = (info_key(namespace, document_id), text_key(namespace, document_id))
        records = (txn.get(Database.DOCUMENTS, key) for key in keys)
        return DocumentSize(info.num_tokens, sum(len(r) for r in records if r is not None))

    def count(self, txn: Transaction, num_new_documents: int, grown: DocumentSize) -> None:
        """Note a change.

        Args:
            txn: The change's transaction.
            num_new_documents: How many documents more there are.
            grown: How much more they take.

        Raises:
            QuotaExceededError: They would take more than allowed.
        """
        old = self.get(txn)
        size = old.size + grown
        if self._quota is not None:
            self._quota.check(old.size, size)
        counter = CounterRecord(
            generation=old.generation + 1,
            num_documents=old.num_documents + num_new_documents,
            num_tokens=size.num_tokens,
            record_bytes=size.record_bytes,
        )
        txn.put(Database.DOCUMENTS, counter_key(self._namespace), encode_record(counter))
