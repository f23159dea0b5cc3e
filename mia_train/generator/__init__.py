"""Fine-tune the generator M_gen (MiA-Gen) on instruction, summary or signature, chunks and question → answer."""
